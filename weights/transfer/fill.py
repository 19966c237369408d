"""Fill a segment: the header first, then every piece over its link.

A watermark grows with the pieces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from weights.formats.segment import Layout
from weights.pool.region import Space
from weights.transfer.link import Link, Transfer
from weights.transfer.pieces import Piece, Watermark
from weights.transfer.reader import ReadStats
from weights.transfer.stripe_plan import StripeSource
from weights.transfer.striping import StripedTransfer, StripeReader


class PieceReader(Protocol):
    """Reads pieces into the region, from several threads.

    Attributes:
        stats: Statistics of the reads so far.
    """

    stats: ReadStats

    def read(self, piece: Piece) -> None: ...
    def close(self) -> None: ...


class Filling:
    """A load in progress."""

    def __init__(
        self,
        layout: Layout,
        region: Space,
        pieces: tuple[Piece, ...],
        *,
        background: bool = False,
        cancelled: threading.Event | None = None,
        on_loaded: Callable[[int], None] | None = None,
        on_arrived: Callable[[int, int], None] | None = None,
        order: Sequence[Piece] = (),
        sparse: bool = False,
        model: str = "",
    ) -> None:
        """Prepare a load.

        Args:
            pieces: The pieces of all weight files, in the segment's order.
            on_arrived: Called with offset and length of each loaded range of the segment, each byte
                once. Padding belongs to the range before it.
            sparse: `pieces` are some of the segment; bytes between them are not reported.
            order: The same pieces in the order to read them; none: the segment's.
            model: Name of the model, for reports of links.
        """
        self._layout, self._region, self._pieces = layout, region, pieces
        self._on_loaded, self._on_arrived = on_loaded, on_arrived
        starts = (*(p.target for p in pieces), layout.total_bytes)
        self._head_end = len(layout.head) if sparse else starts[0]
        self._ends = tuple(p.target + p.length for p in pieces) if sparse else starts[1:]
        self._watermark = Watermark(pieces, len(layout.head), layout.total_bytes)
        self._transfer = Transfer(order or pieces, self._read, background, cancelled, model)
        self._link: Link | None = None
        self._striped: StripedTransfer | None = None
        self._reader: PieceReader | None = None

    @property
    def loaded(self) -> int:
        """Every byte of the segment below this is there."""
        return self._watermark.loaded

    @property
    def order(self) -> Sequence[Piece]:
        """The pieces in the order in which `run` reads them."""
        return self._transfer.pieces

    def write_head(self) -> None:
        """Write header and index; readers may map the segment afterwards.

        Raises:
            InsufficientMemory: Shared memory is full.
        """
        self._region.write(0, self._layout.head)
        if self._on_arrived is not None:
            self._on_arrived(0, self._head_end)

    def run(self, reader: PieceReader, link: Link) -> None:
        """Read every piece over `link`, and close `reader`.

        The function returns or raises only when no thread touches the segment any more.

        Raises:
            Cancelled: `cancelled` was set; raised within the time of a piece. The reader's first
                error is raised, too.
        """
        self._reader, self._link = reader, link
        try:
            link.submit(self._transfer).result()
        finally:
            reader.close()

    def run_striped(self, reader: StripeReader, sources: Sequence[StripeSource], links: Sequence[Link]) -> None:
        """Read every piece from several sources, one link for each.

        Returns and raises as `run` does; the error is that of the last source that failed.
        """
        transfer = self._transfer
        self._striped = StripedTransfer(
            sources,
            transfer.pieces,
            reader,
            self._publish,
            background=transfer.background,
            cancelled=transfer.cancelled,
            model=transfer.model,
        )
        if not transfer.background:  # the priority rose before `_striped` was set
            self._striped.raise_priority()
        self._striped.run(links)

    @property
    def read_by_source(self) -> dict[str, int]:
        """Bytes that each source of a striped load has read so far, by the name of its link."""
        return {s.name: s.read_bytes for s in self._striped.plan.sources} if self._striped is not None else {}

    def raise_priority(self) -> None:
        """Give the load a request's priority: one waits for it now."""
        self._transfer.background = False
        if self._striped is not None:
            self._striped.raise_priority()
        if self._link is not None:
            self._link.raise_priority(self._transfer)

    def _read(self, piece: Piece) -> None:
        assert self._reader is not None
        self._reader.read(piece)
        self._publish(piece)

    def _publish(self, piece: Piece) -> None:
        if self._on_arrived is not None:
            self._on_arrived(piece.target, self._ends[piece.index] - piece.target)
        self._watermark.record_piece(piece)
        if self._on_loaded is not None:
            self._on_loaded(self._watermark.loaded)
