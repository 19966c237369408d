"""A tensor to be converted, and the parts of it that one rank gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from shared.dtypes import DTYPE_BITS

PIECE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class SourceTensor:
    """A tensor to be converted.

    Attributes:
        view: `view(offset, length)` returns that part of the tensor's row-major bytes, valid until
            the next call.
        tie: Tensors with the same `tie` (not None) are the same memory seen in the same way.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    view: Callable[[int, int], memoryview]
    tie: Hashable | None = None


@dataclass(frozen=True)
class Split:
    """A division of dimension `dim` among ranks.

    Each of the `blocks` equal parts of the dimension (a fused projection has two) gives one slice
    to every rank.
    """

    dim: int
    blocks: int = 1


def part_shape(shape: tuple[int, ...], split: Split | None, ranks: int) -> tuple[int, ...]:
    """The shape of each rank's part."""
    if split is None:
        return shape
    return (*shape[: split.dim], shape[split.dim] // ranks, *shape[split.dim + 1 :])


def pieces(tensor: SourceTensor, split: Split | None, rank: int, ranks: int) -> Iterator[memoryview]:
    """The bytes of `rank`'s part, row-major, a piece at a time."""
    if split is None or tensor.nbytes == 0:
        yield from _range(tensor, 0, tensor.nbytes if split is None else 0)
        return
    bits = DTYPE_BITS[tensor.dtype]
    outer = math.prod(tensor.shape[: split.dim])
    run = math.prod(tensor.shape[split.dim :]) * bits // 8 // split.blocks // ranks
    if run >= PIECE_BYTES // 4 or outer * split.blocks == 1:
        for block in range(outer * split.blocks):
            yield from _range(tensor, (block * ranks + rank) * run, run)
        return
    # Many short runs: read what lies between them as well, and pick them out in memory.
    step = max(1, PIECE_BYTES // (run * ranks))
    for block in range(0, outer * split.blocks, step):
        count = min(step, outer * split.blocks - block)
        window = np.frombuffer(tensor.view(block * run * ranks, count * run * ranks), np.uint8)
        yield np.ascontiguousarray(window.reshape(count, ranks, run)[:, rank]).reshape(-1).data


def _range(tensor: SourceTensor, start: int, length: int) -> Iterator[memoryview]:
    for offset in range(start, start + length, PIECE_BYTES):
        yield tensor.view(offset, min(PIECE_BYTES, start + length - offset))
