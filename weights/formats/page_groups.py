"""Group the tensors of a segment by pages, as devices with pages of their own hold them (ADR 0054).

A group is a tensor of at least a page, or neighbours in the order of the file that together reach a
page. Each group begins on a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.contracts.segment import SegmentTensor

PAGE_BYTES = 2 * 1024 * 1024
"""The granularity of CUDA's virtual memory management."""


def pages_of(nbytes: int) -> int:
    """Return the number of pages that hold `nbytes`."""
    return -(-nbytes // PAGE_BYTES)


@dataclass(frozen=True)
class TensorRange:
    """Bytes of the segment that tensors occupy; tensors may overlap."""

    offset: int
    end: int
    tensors: tuple[SegmentTensor, ...]


def group_by_page(tensors: Iterable[SegmentTensor]) -> list[list[TensorRange]]:
    """Return the groups of a segment's tensors, in the order of their offsets.

    Tensors without bytes are in no group; tensors that share bytes are in the same one.
    """
    groups: list[list[TensorRange]] = []
    for found in _ranges(tensors):
        if groups and group_bytes(groups[-1]) < PAGE_BYTES and found.end - found.offset < PAGE_BYTES:
            groups[-1].append(found)
        else:
            groups.append([found])
    return groups


def group_bytes(group: Sequence[TensorRange]) -> int:
    """Return the bytes of a group, padding between its tensors included."""
    return group[-1].end - group[0].offset


def whole_page_bytes(tensors: Iterable[SegmentTensor]) -> int:
    """Return the bytes of the pages that a segment's tensors fill if they share none of them."""
    return sum(pages_of(group_bytes(g)) for g in group_by_page(tensors)) * PAGE_BYTES


def in_order(tensors: Iterable[SegmentTensor]) -> list[SegmentTensor]:
    """Return the tensors that have bytes, by offset, longest first."""
    return sorted((t for t in tensors if t.nbytes), key=lambda t: (t.offset, -t.nbytes, t.name))


def _ranges(tensors: Iterable[SegmentTensor]) -> list[TensorRange]:
    """Join tensors that share bytes; order by offset."""
    found: list[TensorRange] = []
    for tensor in in_order(tensors):
        end = tensor.offset + tensor.nbytes
        if found and tensor.offset < found[-1].end:
            last = found[-1]
            found[-1] = TensorRange(last.offset, max(last.end, end), (*last.tensors, tensor))
        else:
            found.append(TensorRange(tensor.offset, end, (tensor,)))
    return found
