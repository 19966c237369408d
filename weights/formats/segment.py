"""Place weight files in a segment (its layout: shared/contracts/segment.py)."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.segment import HEADER_BYTES, PAGE, SegmentHeader, SegmentIndex, SegmentTensor
from weights.formats.checkpoint import Checkpoint, WeightFile


@dataclass(frozen=True)
class Place:
    """A weight file and its start in the segment, in bytes.

    The start is a page boundary, so that direct reads need no copy.
    """

    file: WeightFile
    offset: int


@dataclass(frozen=True)
class Layout:
    """`head` is all that stands before the data: header and index, padded."""

    header: SegmentHeader
    head: bytes
    places: tuple[Place, ...]

    @property
    def total_bytes(self) -> int:
        return self.header.total_bytes

    @property
    def tensors(self) -> tuple[SegmentTensor, ...]:
        """The tensors, with their offsets in the segment."""
        return _index(self.places).tensors


def pages(size: int) -> int:
    """`size` rounded up to whole pages, in bytes."""
    return -(-size // PAGE) * PAGE


def lay_out(checkpoint: Checkpoint, weights_id: str) -> Layout:
    """The layout of `checkpoint`'s segment. Its size does not depend on `weights_id`."""
    # The index's own length moves the data, and the data's place is written in the index: grow the
    # room until both agree.
    data_offset = HEADER_BYTES
    while True:
        places = _places(checkpoint, data_offset)
        index = _index(places).model_dump_json().encode()
        needed = HEADER_BYTES + pages(len(index))
        if needed <= data_offset:
            break
        data_offset = needed
    last = places[-1]
    header = SegmentHeader(
        weights_id=weights_id, index_bytes=len(index), data_offset=data_offset, total_bytes=last.offset + pages(last.file.size)
    )
    head = header.model_dump_json().encode().ljust(HEADER_BYTES, b"\0") + index
    return Layout(header, head.ljust(data_offset, b"\0"), places)


def _places(checkpoint: Checkpoint, offset: int) -> tuple[Place, ...]:
    places = []
    for file in checkpoint.files:
        places.append(Place(file, offset))
        offset += pages(file.size)
    return tuple(places)


def _index(places: tuple[Place, ...]) -> SegmentIndex:
    return SegmentIndex(
        tensors=tuple(
            SegmentTensor(name=t.name, dtype=t.dtype, shape=t.shape, offset=place.offset + t.offset, nbytes=t.nbytes)
            for place in places
            for t in place.file.header.tensors
        ),
        files=tuple(place.file.name for place in places),
    )
