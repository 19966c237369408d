"""Keys and values of one sequence, and transformers' view of the cache.

Memory grows in blocks of `BLOCK_TOKENS`, one layer after another, so that at most one layer exists
twice at a time. `services.engine.domain.step_planning` counts every block that a sequence may take
before a step runs.
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
    """Keys and values of one sequence.

    Per layer: tensors of shape [1, heads, capacity, head_dim].
    """

    def __init__(self) -> None:
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def append(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values of positions from `start` on.

        Returns:
            All keys and values of the layer up to the new ones.
        """
        end = start + keys.shape[2]
        self._keys[layer] = _store(self._keys.get(layer), start, end, keys)
        self._values[layer] = _store(self._values.get(layer), start, end, values)
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self._keys.values(), *self._values.values()))


def _store(held: torch.Tensor | None, start: int, end: int, new: torch.Tensor) -> torch.Tensor:
    if held is None or held.shape[2] < end:
        grown = new.new_empty((1, new.shape[1], _whole_blocks(end), new.shape[3]))
        if held is not None and start:
            grown[:, :, :start] = held[:, :, :start]
        held = grown
    held[:, :, start:end] = new
    return held


@dataclass(frozen=True)
class Slice:
    """`count` new tokens of one sequence. `kv` already has its first `start` tokens."""

    kv: SequenceKV
    start: int
    count: int


@dataclass
class PackedBatch:
    """The sequences of one forward pass, concatenated along the token axis."""

    slices: Sequence[Slice]
    layer: int = field(default=-1)
    """Set by the cache just before the attention of that layer runs."""


_current: ContextVar[PackedBatch] = ContextVar("packed_batch")


@contextmanager
def packed(batch: PackedBatch) -> Iterator[None]:
    """Compute attention for `batch` in forward passes inside this context."""
    token = _current.set(batch)
    try:
        yield
    finally:
        _current.reset(token)


def current_batch() -> PackedBatch:
    return _current.get()


class PackedCache:
    """The `past_key_values` that transformers sees.

    It only records the layer. The attention function stores keys and values, because it knows where
    each sequence begins and ends.
    """

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
