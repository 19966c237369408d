"""Units that a device lacks, and where their bytes are in host memory."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shared.contracts.segment import SegmentTensor
from weights.formats.execution_order import Rank
from weights.store.pages import StoredUnit
from weights.store.units import Unit


@dataclass
class Missing:
    """A unit whose bytes are not on the device; its pages are reserved under `key`.

    Attributes:
        has_pages: True if its pages are reserved. A unit of unknown content gets them once it is
            hashed.
        rank: Its place in the order of a forward pass.
        peer: Another device that has it, with its pages there as `source`.
        reads_host: True if its bytes are read into host memory, even if a peer has them.
        is_under_way: A thread copies it.
        pieces: (offset in the segment, address, bytes) in host memory, in order of arrival.
    """

    unit: Unit
    key: str
    tensors: tuple[SegmentTensor, ...]
    arrived: int = 0
    rank: Rank = (0, 0, 0)
    peer: str | None = None
    source: StoredUnit | None = None
    reads_host: bool = True
    is_under_way: bool = False
    has_pages: bool = True
    pieces: list[tuple[int, int, int]] = field(default_factory=list)


def digests_of(missing: Missing) -> dict[str, str]:
    """Hash the unit's tensors in host memory."""
    pieces = sorted(missing.pieces)
    found = {}
    for tensor in missing.tensors:
        digest = hashlib.sha256()
        for address, nbytes in _parts(pieces, tensor.offset, tensor.offset + tensor.nbytes):
            digest.update((ctypes.c_char * nbytes).from_address(address))
        found[tensor.name] = digest.hexdigest()
    return found


def _parts(pieces: Sequence[tuple[int, int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield address and length of the parts of [start, end), in order."""
    for offset, address, nbytes in pieces:
        first, last = max(start, offset), min(end, offset + nbytes)
        if first < last:
            yield address + first - offset, last - first
