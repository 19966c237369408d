"""Keys and values of one sequence, and transformers' view of the cache.

A layer's keys and values are head-major, [2, heads, tokens, head_dim], because the CPU's attention
reads them fastest so (ADR 0056). On the CPU the addresses for the longest context are reserved at
once, and memory is used as the sequence grows. On a GPU that lends pages, all layers of a token are
together (`services.engine.model.gpu_kv`). `services.engine.domain.step_planning` counts every
block that a sequence may take before a step runs.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from services.engine.domain.step_planning import BLOCK_TOKENS
from services.engine.generation.kv_memory import PAGE, reserve

log = logging.getLogger(__name__)


class Range(Protocol):
    """Addresses of one sequence, to which memory is mapped as it grows.

    - `cover` maps memory for the first `tokens` tokens.
    - `layer` returns a layer's keys and values: [2, heads, tokens of the context, width]. Only
      tokens that `cover` has mapped have memory.
    """

    def cover(self, tokens: int) -> None: ...
    def layer(self, layer: int, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor: ...


class RangeMemory(Protocol):
    """The source of ranges, to which they return when their sequence ends."""

    @property
    def block_bytes(self) -> int: ...
    def take(self) -> Any: ...
    def take_back(self, found: Any) -> None: ...


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


class SequenceKV:
    """Keys and values of one sequence.

    Its memory is freed with the last reference to it.
    """

    def __init__(self, context: int = 0, memory: RangeMemory | None = None) -> None:
        """Create an empty cache.

        Args:
            context: Most tokens that the sequence may have. A longer one, or one on a GPU without
                `memory`, is copied when it grows beyond its last block.
            memory: Has memory for the keys and values; None: torch has.
        """
        self._context, self._memory = context, memory
        self._range: Range | None = None
        self._layers: dict[int, torch.Tensor] = {}
        self._length = 0

    def append(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values of positions from `start` on.

        Args:
            keys, values: Shape [1, heads, new tokens, head_dim].

        Returns:
            All keys and values of the layer up to the new ones.
        """
        end = start + keys.shape[2]
        if self._range is not None:
            self._range.cover(end)
        held = self._layers.get(layer)
        if held is None or held.shape[2] < end:
            held = self._layers[layer] = self._grow(layer, held, start, end, keys)
        self._length = end
        held[:1, :, start:end] = keys
        held[1:, :, start:end] = values
        return held[:1, :, :end], held[1:, :, :end]

    def _cover(self, memory: RangeMemory, end: int) -> Range:
        """Return the range of the sequence, with memory for its first `end` tokens."""
        if self._range is None:
            found = memory.take()
            weakref.finalize(self, memory.take_back, found).atexit = False
            self._range = found
            found.cover(end)
        return self._range

    def _grow(self, layer: int, held: torch.Tensor | None, start: int, end: int, new: torch.Tensor) -> torch.Tensor:
        heads, width = new.shape[1], new.shape[3]
        if self._memory is not None:
            return self._cover(self._memory, end).layer(layer, heads, width, new.dtype)
        grown = None
        if new.device.type == "cpu" and end <= self._context:
            grown = _reserve((2, heads, _whole_blocks(self._context), width), new.dtype)
        if grown is None:
            grown = new.new_empty((2, heads, _whole_blocks(end), width))
        if held is not None and start:
            grown[:, :, :start] = held[:, :, :start]
        return grown

    @property
    def layers(self) -> dict[int, torch.Tensor]:
        """Memory of each layer that has keys and values: [2, heads, tokens or more, head_dim]."""
        return dict(sorted(self._layers.items()))

    def copy_range(self, layer: int, start: int, end: int) -> torch.Tensor:
        """Copy positions [start, end) of a layer to host memory: [2, heads, tokens, head_dim]."""
        held = self._layers[layer][:, :, start:end]
        return torch.empty(held.shape, dtype=held.dtype).copy_(held)

    @property
    def nbytes(self) -> int:
        """Bytes of memory for its blocks."""
        tokens = _whole_blocks(self._length)
        if self._memory is not None:
            return tokens // BLOCK_TOKENS * self._memory.block_bytes
        return sum(2 * t.shape[1] * _whole_pages(tokens * t.shape[3] * t.itemsize) for t in self._layers.values())


def _whole_pages(nbytes: int) -> int:
    """Round up: heads are at consecutive addresses, each with the pages that it has written."""
    return -(-nbytes // PAGE) * PAGE


def _reserve(shape: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor | None:
    """Reserve addresses for a tensor. None: the kernel refuses."""
    count = shape[0] * shape[1] * shape[2] * shape[3]
    try:
        return reserve(count * dtype.itemsize).view(dtype).view(shape)
    except OSError as e:
        log.debug("failed to reserve addresses for the KV cache: contexts are copied as they grow", extra={"error": str(e)})
        return None


@dataclass(frozen=True)
class Slice:
    """New tokens of one sequence.

    Attributes:
        kv: The sequence's cache, with its first `start` tokens.
        start: Position of the first new token.
        count: Number of new tokens.
    """

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
