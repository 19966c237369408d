"""Place weight files in a segment (its layout: shared/contracts/segment.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shared.contracts.segment import HEADER_BYTES, PAGE, SegmentHeader, SegmentIndex, SegmentTensor
from shared.contracts.stages import LayerRange
from weights.formats.checkpoint import Checkpoint, WeightFile
from weights.formats.ranks import cut_tensors
from weights.formats.safetensors import TensorEntry
from weights.formats.stages import names_of_stage


@dataclass(frozen=True)
class Place:
    """A weight file, or a range of it, and its start in the segment, in bytes.

    Starts are page boundaries, so that direct reads need no copy.

    Attributes:
        offset: Start in the segment.
        start: First byte of the range in the file.
        length: Bytes of the range; None: up to the end of the file.
        wanted: Names of its tensors in the index; None: all.
    """

    file: WeightFile
    offset: int
    start: int = 0
    length: int | None = None
    wanted: frozenset[str] | None = None

    @property
    def size(self) -> int:
        return self.file.size - self.start if self.length is None else self.length

    @property
    def tensors(self) -> Iterator[tuple[TensorEntry, int]]:
        """The tensors in this place, with their offsets in the segment."""
        first, end = self.start, self.start + self.size
        for t in self.file.header.tensors:
            if first <= t.offset and t.offset + t.nbytes <= end and (self.wanted is None or t.name in self.wanted):
                yield t, self.offset + t.offset - self.start


@dataclass(frozen=True)
class Layout:
    """The contents of a segment and their places.

    Attributes:
        head: The bytes before the data: header and index, padded.
        places: The data's places, by file.
    """

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


def lay_out(
    checkpoint: Checkpoint, weights_id: str, layers: LayerRange | None = None, rows: Mapping[str, range] | None = None
) -> Layout:
    """The layout of `checkpoint`'s segment. Its size does not depend on `weights_id`.

    Args:
        layers: Only the tensors that a stage with these layers needs; None: all.
        rows: The rows of some tensors that a rank needs (`ranks.rows_of_rank`).

    Raises:
        CheckpointInvalid: The checkpoint has no such layers.
    """
    names = [t.name for f in checkpoint.files for t in f.header.tensors]
    wanted = frozenset(names) if rows else None
    if layers is not None:
        wanted = names_of_stage(names, layers)
    if rows:
        checkpoint = cut_tensors(checkpoint, rows)
    # The index's own length moves the data, and the data's place is written in the index: grow the
    # room until both agree.
    data_offset = HEADER_BYTES
    while True:
        places = _places(checkpoint, data_offset, wanted)
        index = _index(places).model_dump_json(exclude_none=True).encode()
        needed = HEADER_BYTES + pages(len(index))
        if needed <= data_offset:
            break
        data_offset = needed
    last = places[-1]
    header = SegmentHeader(
        weights_id=weights_id, index_bytes=len(index), data_offset=data_offset, total_bytes=last.offset + pages(last.size)
    )
    head = header.model_dump_json().encode().ljust(HEADER_BYTES, b"\0") + index
    return Layout(header, head.ljust(data_offset, b"\0"), places)


def _places(checkpoint: Checkpoint, offset: int, wanted: frozenset[str] | None) -> tuple[Place, ...]:
    places = []
    for file in checkpoint.files:
        for start, end in [(0, file.size)] if wanted is None else _ranges(file, wanted):
            place = Place(file, offset, start, end - start, wanted)
            places.append(place)
            offset += pages(place.size)
    return tuple(places)


def _ranges(file: WeightFile, wanted: frozenset[str]) -> list[tuple[int, int]]:
    """Return the ranges of a file that hold the wanted tensors, in whole pages."""
    found: list[tuple[int, int]] = []
    for t in sorted((t for t in file.header.tensors if t.name in wanted), key=lambda t: t.offset):
        start = t.offset // PAGE * PAGE
        end = min(pages(max(t.offset + t.nbytes, start + 1)), file.size)
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _index(places: tuple[Place, ...]) -> SegmentIndex:
    return SegmentIndex(
        tensors=tuple(
            SegmentTensor(name=t.name, dtype=t.dtype, shape=t.shape, offset=offset, nbytes=t.nbytes, cut=t.cut)
            for place in places
            for t, offset in place.tensors
        ),
        files=tuple(dict.fromkeys(place.file.name for place in places)),
    )
