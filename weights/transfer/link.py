"""Run a link's threads, which read the pieces of all its loads.

`link_queue.py` decides their order.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.contracts.loader import LinkStatus
from weights.tiers.port import Cancelled
from weights.transfer import link_queue as links
from weights.transfer.pieces import Piece

log = logging.getLogger(__name__)
_numbers = itertools.count(1)


@dataclass
class Transfer:
    """One load on one link.

    `read` is called with each piece, from the link's threads; the first error ends the load.
    """

    pieces: Sequence[Piece]
    read: Callable[[Piece], None]
    background: bool = False
    cancelled: threading.Event | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    _begun: int = 0
    _running: int = 0
    _error: BaseException | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def result(self) -> None:
        """Wait until every piece is read, or an error or a cancellation has taken effect.

        The function raises the error when no piece is being read any more.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error


class Link:
    """Threads start with the first load and end with `close`."""

    def __init__(self, name: str, threads: int, order: links.Order = "fair", clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._count, self._clock = threads, clock
        self._line, self._speed = links.Line(order), links.Speed()
        self._transfers: dict[int, Transfer] = {}
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._active = 0
        self._moved_bytes = 0
        self._closing = False

    def submit(self, transfer: Transfer) -> Transfer:
        with self._changed:
            if not transfer.pieces:
                transfer._over.set()
                return transfer
            self._transfers[transfer.number] = transfer
            nbytes = sum(p.length for p in transfer.pieces)
            self._line = links.join(self._line, links.Load(transfer.number, len(transfer.pieces), nbytes, transfer.background))
            while len(self._threads) < min(self._count, len(transfer.pieces)):
                name = f"{self.name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify_all()
        return transfer

    def raise_priority(self, transfer: Transfer) -> None:
        """Give the load a request's priority: one waits for it now."""
        with self._changed:
            self._line = links.raise_priority(self._line, transfer.number)

    def status(self) -> LinkStatus:
        with self._changed:
            queued, speed = self._line.queued_bytes, self._speed.bytes_per_second
            finish = queued / speed * 1e3 if queued and speed else None
            return LinkStatus(
                link=self.name,
                bytes_per_second=speed,
                queued_bytes=queued,
                loads=len(self._line.loads),
                finish_ms=finish,
                moved_bytes=self._moved_bytes,
            )

    def close(self) -> None:
        """End the threads after the pieces they read.

        Loads that are not over end as cancelled.
        """
        with self._changed:
            self._closing = True
            for transfer in list(self._transfers.values()):
                self._fail(transfer, Cancelled())
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # -- the threads -------------------------------------------------------------------------------

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            transfer, piece = taken
            error: BaseException | None = None
            try:
                if transfer.cancelled is not None and transfer.cancelled.is_set():
                    raise Cancelled
                transfer.read(piece)
            except BaseException as e:  # the thread's boundary: the load's waiter needs the error
                error = e
            self._on_finished(transfer, piece, error)

    def _take(self) -> tuple[Transfer, Piece] | None:
        with self._changed:
            while not self._closing:
                number = links.find_next(self._line)
                if number is not None:
                    transfer = self._transfers[number]
                    piece = transfer.pieces[transfer._begun]
                    transfer._begun += 1
                    transfer._running += 1
                    self._active += 1
                    self._line = links.record_begin(self._line, number, piece.length)
                    self._speed = links.record_busy(self._speed, self._clock())
                    return transfer, piece
                self._changed.wait()
            return None

    def _on_finished(self, transfer: Transfer, piece: Piece, error: BaseException | None) -> None:
        with self._changed:
            transfer._running -= 1
            self._active -= 1
            if error is not None:
                self._fail(transfer, error)
            else:
                self._line = links.record_end(self._line, transfer.number, piece.length)
                self._moved_bytes += piece.length
                self._speed = links.record_bytes(self._speed, piece.length, self._clock())
                self._end_if_over(transfer)
            if not self._active and links.find_next(self._line) is None:
                self._speed = links.record_idle(self._speed, self._clock())

    def _fail(self, transfer: Transfer, error: BaseException) -> None:
        transfer._error = transfer._error or error
        transfer._begun = len(transfer.pieces)
        self._line = links.leave(self._line, transfer.number)
        self._end_if_over(transfer)

    def _end_if_over(self, transfer: Transfer) -> None:
        if not transfer._running and transfer._begun == len(transfer.pieces):
            self._line = links.leave(self._line, transfer.number)
            self._transfers.pop(transfer.number, None)
            transfer._over.set()
