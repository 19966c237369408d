"""Cut a load into pieces, each in one chunk of the pool, and track its watermark."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts.segment import PAGE
from weights.formats.execution_order import Rank, execution_rank
from weights.formats.segment import Layout
from weights.pool.chunks import CHUNK_BYTES

TAIL_BYTES = 4 * CHUNK_BYTES
TAIL_PIECE_BYTES = 4 * 1024 * 1024
"""Size of the last pieces of a file on a disk.

They are smaller, so that all reading threads end together.
"""


@dataclass(frozen=True)
class Piece:
    """A range of a weight file and its target in the segment.

    Attributes:
        index: Number of the piece in the load.
        file: Number of the weight file.
        offset: First byte in the file.
        length: Number of bytes.
        target: First byte in the segment.
    """

    index: int
    file: int
    offset: int
    length: int
    target: int


def cut(layout: Layout, piece_bytes: int = CHUNK_BYTES, *, remote: bool = False) -> tuple[Piece, ...]:
    """Return the pieces of all weight files, in the segment's order.

    No piece crosses a chunk's border or is longer than `piece_bytes` (whole pages).

    Args:
        remote: Each piece costs a request, so the last ones are not smaller.
    """
    found: list[Piece] = []
    tail = layout.total_bytes - TAIL_BYTES
    for number, place in enumerate(layout.places):
        at = 0
        while at < place.size:
            target = place.offset + at
            most = piece_bytes if remote or target < tail else min(piece_bytes, TAIL_PIECE_BYTES)
            length = min(place.size - at, CHUNK_BYTES - target % CHUNK_BYTES, most)
            found.append(Piece(len(found), number, place.start + at, length, target))
            at += length
    return tuple(found)


def cut_ranges(layout: Layout, ranges: Sequence[tuple[int, int]], *, remote: bool = False) -> tuple[Piece, ...]:
    """Return the pieces that cover some ranges of the segment, in the segment's order.

    Pieces begin on pages, for direct reads.

    Args:
        layout: The segment.
        ranges: First byte and end of each.
        remote: As in `cut`.
    """
    found: list[Piece] = []
    for start, end in _whole_pages(ranges):
        for number, place in enumerate(layout.places):
            at, last = max(start, place.offset), min(end, place.offset + place.size)
            while at < last:
                length = min(last - at, CHUNK_BYTES - at % CHUNK_BYTES, CHUNK_BYTES if remote else TAIL_PIECE_BYTES)
                found.append(Piece(len(found), number, place.start + at - place.offset, length, at))
                at += length
    return tuple(found)


def _whole_pages(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Extend ranges to whole pages, and join those that meet."""
    found: list[tuple[int, int]] = []
    for start, end in sorted((start // PAGE * PAGE, -(-end // PAGE) * PAGE) for start, end in ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def in_execution_order(layout: Layout, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Return `pieces` in the order in which a forward pass first needs a byte of them.

    Args:
        layout: The segment.
        pieces: All pieces, or some, in the segment's order.
    """
    starts = [p.target for p in pieces]
    ranks: dict[int, Rank] = {}
    for tensor in layout.tensors:
        rank = execution_rank(tensor.name)
        at = max(0, bisect_right(starts, tensor.offset) - 1)
        if at < len(pieces) and pieces[at].target + pieces[at].length <= tensor.offset:
            at += 1
        while at < len(pieces) and pieces[at].target < tensor.offset + tensor.nbytes:
            ranks[at] = min(rank, ranks.get(at, rank))
            at += 1
    return tuple(sorted(pieces, key=lambda p: (ranks.get(p.index, (0, 0, 0)), p.index)))


class Watermark:
    """Loaded bytes of a segment. Threads report pieces in any order."""

    def __init__(self, pieces: Sequence[Piece], head: int, total: int) -> None:
        """Create the watermark of a segment whose first `head` bytes are loaded."""
        self._pieces, self._total, self._head = pieces, total, head
        self._arrived = bytearray(len(pieces))
        self._next = 0
        self._lock = threading.Lock()

    @property
    def loaded(self) -> int:
        """Every byte of the segment below this is loaded."""
        at = self._next  # other threads advance it
        if at == len(self._pieces):
            return self._total
        return max(self._head, self._pieces[at].target) if at else self._head

    def record_piece(self, piece: Piece) -> None:
        """Record a loaded piece."""
        with self._lock:
            self._arrived[piece.index] = 1
            while self._next < len(self._pieces) and self._arrived[self._next]:
                self._next += 1
