"""Translation of a llama-swap configuration into a thaw.yaml."""

from thaw.llama_swap.document import Draft, Loss, render
from thaw.llama_swap.translate import translate

__all__ = ["Draft", "Loss", "render", "translate"]
