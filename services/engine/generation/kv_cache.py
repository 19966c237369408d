"""Keys and values of one sequence, and the cache object through which transformers' models store them.

Memory grows by blocks of `BLOCK_TOKENS`, layer after layer, so that at no time more than one layer is held twice. Every block that a
sequence may hold is counted by `services.engine.domain.step_planning` before a step runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from services.engine.domain.step_planning import BLOCK_TOKENS


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


class SequenceKV:
    """Keys and values of one sequence in all layers: tensors of shape [1, heads, capacity, head_dim]."""

    def __init__(self) -> None:
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def append(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store `keys` and `values` of the positions from `start` on; all of the layer's keys and values up to and with them."""
        end = start + keys.shape[2]
        self._keys[layer] = _put(self._keys.get(layer), start, end, keys)
        self._values[layer] = _put(self._values.get(layer), start, end, values)
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self._keys.values(), *self._values.values()))


def _put(held: torch.Tensor | None, start: int, end: int, new: torch.Tensor) -> torch.Tensor:
    if held is None or held.shape[2] < end:
        grown = new.new_empty((1, new.shape[1], _whole_blocks(end), new.shape[3]))
        if held is not None and start:
            grown[:, :, :start] = held[:, :, :start]
        held = grown
    held[:, :, start:end] = new
    return held


@dataclass(frozen=True)
class Slice:
    """`count` new tokens of one sequence, whose first `start` tokens are in `kv` already."""

    kv: SequenceKV
    start: int
    count: int


@dataclass
class PackedBatch:
    """The sequences of one forward pass, one after the other along the token axis."""

    slices: Sequence[Slice]
    layer: int = field(default=-1)
    """Set by the cache just before the same layer's attention runs."""


_current: ContextVar[PackedBatch] = ContextVar("packed_batch")


@contextmanager
def packed(batch: PackedBatch) -> Iterator[None]:
    """Forward passes inside compute attention for `batch`."""
    token = _current.set(batch)
    try:
        yield
    finally:
        _current.reset(token)


def current_batch() -> PackedBatch:
    return _current.get()


class PackedCache:
    """What transformers sees as `past_key_values`: it only notes the layer; the attention function does the storing, for it knows
    where each sequence begins and ends."""

    is_compileable = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        current_batch().layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0
