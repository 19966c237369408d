"""Cut a checkpoint into units: what is hashed, shared, reclaimed and mapped (ADR 0054).

A unit is a tensor of at least a page, or neighbours in the order of the file that together reach a
page. Units tile the tensors of a segment: every tensor is in exactly one unit, tensors that share
bytes (tied embeddings) are in the same one.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shared.contracts.segment import SegmentTensor
from weights.formats.page_groups import PAGE_BYTES as PAGE_BYTES
from weights.formats.page_groups import TensorRange, group_by_page, group_bytes, in_order
from weights.formats.page_groups import pages_of as pages_of


@dataclass(frozen=True)
class Unit:
    """A range of a segment, with the identity of its content.

    Attributes:
        key: Equal keys mean equal bytes, tensor by tensor.
        offset: First byte in the segment.
        nbytes: Bytes of the range, padding between its tensors included.
    """

    key: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def pages(self) -> int:
        return pages_of(self.nbytes)


def cut_units(tensors: Iterable[SegmentTensor], digests: Mapping[str, str], weights_id: str) -> tuple[Unit, ...]:
    """Return the units of a segment, in the order of their offsets.

    Args:
        tensors: The segment's tensors. Tensors without bytes belong to no unit.
        digests: SHA-256 of a tensor's bytes by its name, as far as they are known.
        weights_id: Identity of the weights, for units with an unknown digest: these are shared with
            no other weights.
    """
    return tuple(_unit(group, digests, weights_id) for group in group_by_page(tensors))


def _unit(group: Sequence[TensorRange], digests: Mapping[str, str], weights_id: str) -> Unit:
    start, nbytes = group[0].offset, group_bytes(group)
    tensors = [t for found in group for t in found.tensors]
    if any(t.name not in digests for t in tensors):
        private = hashlib.sha256(f"{weights_id}\0{start}\0{nbytes}".encode()).hexdigest()
        return Unit(f"private:{private}", start, nbytes)
    return Unit(content_key(start, tensors, digests), start, nbytes)


def content_key(start: int, tensors: Iterable[SegmentTensor], digests: Mapping[str, str]) -> str:
    """Return the key of a unit by its content.

    Args:
        start: Offset of the unit in the segment.
        tensors: The unit's tensors, as `tensors_of` returns them.
        digests: SHA-256 of each tensor's bytes by its name.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.offset - start}\0{tensor.nbytes}\0{digests[tensor.name]}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def tensors_of(units: Sequence[Unit], tensors: Iterable[SegmentTensor]) -> tuple[tuple[SegmentTensor, ...], ...]:
    """Return the tensors of each of the segment's units, in the order of their offsets.

    Raises:
        KeyError: A tensor is in none of the units.
    """
    starts = [u.offset for u in units]
    found: list[list[SegmentTensor]] = [[] for _ in units]
    for tensor in in_order(tensors):
        at = bisect_right(starts, tensor.offset) - 1
        if at < 0 or tensor.offset + tensor.nbytes > units[at].end:
            raise KeyError(tensor.name)
        found[at].append(tensor)
    return tuple(map(tuple, found))


@dataclass(frozen=True)
class AddressRange:
    """The contiguous addresses that an engine maps for some units, each from a page on.

    Attributes:
        units: In order of their offsets in the segment.
        starts: Offset of each unit in the range, in bytes.
        nbytes: Length of the range, whole pages.
    """

    units: tuple[Unit, ...]
    starts: tuple[int, ...]
    nbytes: int

    def place(self, tensor: SegmentTensor) -> int:
        """Return the offset of a tensor in the range.

        Raises:
            KeyError: The tensor is in none of the units.
        """
        for unit, start in zip(self.units, self.starts, strict=True):
            if unit.offset <= tensor.offset and tensor.offset + tensor.nbytes <= unit.end:
                return start + tensor.offset - unit.offset
        raise KeyError(tensor.name)


def address_range(units: Sequence[Unit]) -> AddressRange:
    """Return the address range of `units`; a unit that appears twice is mapped twice.

    Raises:
        ValueError: The units overlap or are not in order.
    """
    if any(a.end > b.offset for a, b in pairwise(units)):
        raise ValueError("the units overlap or are not in order")
    starts, at = [], 0
    for unit in units:
        starts.append(at)
        at += unit.pages * PAGE_BYTES
    return AddressRange(tuple(units), tuple(starts), at)
