"""The properties of a model's files, which a loader reads without the weights."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from shared.contracts.base import Frozen
from shared.contracts.stages import LayerRange, RankOf


class LinearShape(Frozen):
    """Weight matrices of one kind: `name` is their module's, each number in it as `*`."""

    name: str
    rows: int
    columns: int
    count: int = Field(default=1, description="How many there are.")


class AdapterInfo(Frozen):
    """The properties of a LoRA adapter's files (PEFT's adapter_config.json).

    `modules`: the matrices of its base that it adds to, as they lie in the base's files. Patterns
    hold for modules whose name is theirs or ends with it.
    """

    rank: int = Field(gt=0)
    alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    made_for: str = Field(default="", description="base_model_name_or_path, as its author's files call the base.")
    modules: tuple[LinearShape, ...] = ()

    def rank_of(self, module: str) -> int:
        return next((r for name, r in self.rank_pattern.items() if _is_or_ends(module, name)), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of the product of the module's pair."""
        alpha = next((a for name, a in self.alpha_pattern.items() if _is_or_ends(module, name)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _is_or_ends(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


class LayerSizes(Frozen):
    """The sizes of a decoder's parts in bytes, each at most what a stage's segment takes for it."""

    count: int = Field(gt=0, description="Layers.")
    embedding_bytes: int = Field(ge=0)
    layer_bytes: int = Field(ge=0, description="The largest layer.")
    head_bytes: int = Field(ge=0, description="Norm and head; with the embeddings if those are the head too.")

    def bytes_of(self, layers: LayerRange) -> int:
        """Return an upper bound of the segment of a stage with `layers`."""
        first = self.embedding_bytes if layers.is_first else 0
        last = self.head_bytes if layers.is_last else 0
        return first + layers.count * self.layer_bytes + last


class ModelInfo(Frozen):
    """The properties of a model's files, which the loader reads without the weights."""

    source: str = Field(description="The source as resolved: an absolute directory, or hf:// with its commit.")
    revision: str = Field(description="Digest that changes when any weight file does; two equal ones may share memory.")
    architecture: str
    model_type: str
    task: Literal["generate", "embed"]
    weights_bytes: int = Field(ge=0)
    page_bytes: int = Field(
        default=0,
        ge=0,
        description="Whole pages that the weights fill on a device with pages of its own, if none is shared; 0: unknown.",
    )
    parameters: int = Field(ge=0)
    dtype: str
    context_length: int = Field(gt=0)
    kv_bytes_per_token: int = Field(ge=0)
    has_chat_template: bool = False
    files: int = Field(default=1, ge=1)
    vocab_size: int = Field(default=0, ge=0, description="Token ids there are, as config.json says; 0: unknown.")
    special_token_ids: tuple[int, ...] = Field(
        default=(), description="Token ids that `skip_special_tokens` leaves out of a text, as the tokenizer's files say."
    )
    shape: str = Field(
        default="",
        description="Digest of config.json and of the tensors' names, types and shapes. Models of one shape differ in weights, tokenizer and "
        "chat template only. Empty: unknown.",
    )
    layers: LayerSizes | None = Field(default=None, description="Of a decoder with numbered layers: the sizes of its parts.")
    divided_bytes: int = Field(
        default=0, ge=0, description="Of those tensors of which a tensor-parallel rank's part has a range; it has all others whole."
    )
    ranks: int = Field(default=1, ge=1, description="Ranks that its files were divided for by `thaw convert --tensor-parallel`.")
    modules: tuple[LinearShape, ...] = Field(default=(), description="The weight matrices that an adapter may add to.")
    adapter: AdapterInfo | None = Field(default=None, description="Of a LoRA adapter; its other values are then its base's.")

    def part_bytes(self, layers: LayerRange | None, rank: RankOf | None = None) -> int:
        """Return the bytes that a stage with `layers`, or a rank, needs; None of both: all."""
        if layers is not None:
            return min(self.weights_bytes, self.layers.bytes_of(layers)) if self.layers is not None else self.weights_bytes
        if rank is not None:
            return self.weights_bytes - self.divided_bytes * (rank.count - 1) // rank.count
        return self.weights_bytes
