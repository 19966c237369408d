"""A correction of vLLM's LoRA on cpu, until vLLM has it (vllm-project/vllm pull request 48421).

Rows of a batch that use no adapter have the index -1. vLLM's kernels for GPUs skip them; those for
cpu (vllm/lora/ops/torch_ops, seen in 0.32) index the adapters' slots with it, so that such rows get
the adapter in the last slot: requests for the base answer with another model's tokens.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_CORRECTED = "thaw_corrected"


def correct_rows_without_adapter() -> None:
    """Zero the low-rank products of rows without an adapter. Calling it again has no effect."""
    from vllm.lora.punica_wrapper import punica_cpu  # type: ignore[import-not-found]  # there in vLLM's environment only

    if not hasattr(punica_cpu, _CORRECTED):
        punica_cpu.bgmv_shrink = _wrap(punica_cpu.bgmv_shrink, _indices_of_rows)
        punica_cpu.sgmv_shrink = _wrap(punica_cpu.sgmv_shrink, _indices_of_sequences)
        setattr(punica_cpu, _CORRECTED, True)


def _wrap(shrink: Callable[..., None], indices_of: Callable[..., torch.Tensor]) -> Callable[..., None]:
    """Wrap a function that writes the products with the first matrices into its third argument.

    The second matrices then add nothing to rows of zeros.
    """

    @wraps(shrink)
    def shrink_and_zero(inputs: torch.Tensor, matrices: torch.Tensor, output: torch.Tensor, *rest: Any) -> None:
        shrink(inputs, matrices, output, *rest)
        without = indices_of(*rest) < 0
        output[: len(without)].masked_fill_(without.unsqueeze(1), 0)

    return shrink_and_zero


def _indices_of_rows(indices: torch.Tensor, *_rest: Any) -> torch.Tensor:
    return indices


def _indices_of_sequences(_starts: torch.Tensor, lengths: torch.Tensor, indices: torch.Tensor, *_rest: Any) -> torch.Tensor:
    return indices.repeat_interleave(lengths)
