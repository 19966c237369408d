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
from typing import Protocol, TypeVar

from shared.contracts.loader import LinkStatus
from weights.tiers.port import Cancelled
from weights.transfer import link_queue as links
from weights.transfer.pieces import Piece

log = logging.getLogger(__name__)
numbers = itertools.count(1)


@dataclass(frozen=True)
class Taken:
    """A chunk that a link's thread reads now.

    Attributes:
        length: Its bytes.
        read: Returns the number of bytes that the link has moved.
    """

    length: int
    read: Callable[[], int]


class LinkLoad(Protocol):
    """One load on one link. The link calls the methods under its lock.

    Attributes:
        running: Chunks that its threads read now, which it counts itself.
        model: The name of the model, for reports; empty: not known.
    """

    model: str
    number: int
    background: bool
    running: int

    @property
    def is_exhausted(self) -> bool:
        """True if no chunk will be taken any more."""
        ...

    def list_left(self) -> tuple[int, int]:
        """Return the number of chunks that may be taken now, and the bytes to take."""
        ...

    def take(self) -> Taken | None:
        """Take the next chunk; None: there is none any more."""
        ...

    def abandon(self, error: BaseException) -> None:
        """Take no more chunks: a read failed, or the link is closing."""
        ...

    def on_over(self) -> None:
        """No chunk is left or being read."""
        ...


_L = TypeVar("_L", bound=LinkLoad)


@dataclass
class Transfer:
    """One load with one source.

    Attributes:
        read: Called with each piece, from the link's threads; the first error ends the load.
        model: As in `LinkLoad`.
    """

    pieces: Sequence[Piece]
    read: Callable[[Piece], None]
    background: bool = False
    cancelled: threading.Event | None = None
    model: str = ""
    number: int = field(default_factory=lambda: next(numbers))
    running: int = 0
    _begun: int = 0
    _left_bytes: int = 0
    _error: BaseException | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._left_bytes = sum(p.length for p in self.pieces)

    @property
    def is_exhausted(self) -> bool:
        return self._begun == len(self.pieces)

    def list_left(self) -> tuple[int, int]:
        return len(self.pieces) - self._begun, self._left_bytes

    def take(self) -> Taken | None:
        if self.is_exhausted:
            return None
        piece = self.pieces[self._begun]
        self._begun += 1
        self._left_bytes -= piece.length
        return Taken(piece.length, lambda: self._read(piece))

    def abandon(self, error: BaseException) -> None:
        self._error = self._error or error
        self._begun, self._left_bytes = len(self.pieces), 0

    def on_over(self) -> None:
        self._over.set()

    def result(self) -> None:
        """Wait until every piece is read, or an error or a cancellation has taken effect.

        The function raises the error when no piece is being read any more.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error

    def _read(self, piece: Piece) -> int:
        if self.cancelled is not None and self.cancelled.is_set():
            raise Cancelled
        self.read(piece)
        return piece.length


class Link:
    """Threads start with the first load and end with `close`."""

    def __init__(self, name: str, threads: int, order: links.Order = "fair", clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._count, self._clock = threads, clock
        self._line, self._speed = links.Line(order), links.Speed()
        self._transfers: dict[int, LinkLoad] = {}
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._active = 0
        self._moved_bytes = 0
        self._closing = False

    def submit(self, transfer: _L) -> _L:
        """Queue a load. On a closed link it ends as cancelled.

        Raises:
            RuntimeError: The link has no thread, and none can be started. The load is not queued.
        """
        with self._changed:
            if self._closing:
                transfer.abandon(Cancelled())
            if transfer.is_exhausted:
                transfer.on_over()
                return transfer
            chunks, nbytes = transfer.list_left()
            self._start_threads(chunks)
            self._transfers[transfer.number] = transfer
            self._line = links.join(self._line, links.Load(transfer.number, chunks, nbytes, transfer.background))
            self._changed.notify_all()
        return transfer

    @property
    def has_started(self) -> bool:
        """True if the link has been read over."""
        return bool(self._threads)

    def refresh(self, transfer: LinkLoad) -> None:
        """Ask `transfer` again what is left: it has changed."""
        with self._changed:
            if transfer.number not in self._transfers:
                return
            chunks, nbytes = transfer.list_left()
            self._line = links.offer(self._line, transfer.number, chunks, nbytes)
            self._end_if_over(transfer)
            if chunks:
                self._start_threads(chunks)
                self._changed.notify_all()

    def _start_threads(self, chunks: int) -> None:
        while len(self._threads) < min(self._count, chunks) and not self._closing:
            thread = threading.Thread(target=self._work, name=f"{self.name}-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError as e:
                if not self._threads:
                    raise
                log.warning(
                    "failed to start a thread of a link; fewer read",
                    extra={"link": self.name, "threads": len(self._threads), "error": str(e)},
                )
                return
            self._threads.append(thread)

    def raise_priority(self, transfer: LinkLoad) -> None:
        """Give the load a request's priority: one waits for it now."""
        with self._changed:
            self._line = links.raise_priority(self._line, transfer.number)

    def status(self) -> LinkStatus:
        with self._changed:
            queued, speed = self._line.queued_bytes, self._speed.bytes_per_second
            finish = queued / speed * 1e3 if queued and speed else None
            models = {t.model for t in self._transfers.values() if t.model}
            return LinkStatus(
                link=self.name,
                bytes_per_second=speed,
                queued_bytes=queued,
                loads=len(self._line.loads),
                finish_ms=finish,
                moved_bytes=self._moved_bytes,
                models=tuple(sorted(models)),
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
        while (found := self._take()) is not None:
            transfer, taken = found
            error: BaseException | None = None
            moved_bytes = 0
            try:
                moved_bytes = taken.read()
            except BaseException as e:  # the thread's boundary: the load's waiter needs the error
                error = e
            self._on_finished(transfer, taken, moved_bytes, error)

    def _take(self) -> tuple[LinkLoad, Taken] | None:
        with self._changed:
            while not self._closing:
                number = links.find_next(self._line)
                if number is None:
                    self._changed.wait()
                    continue
                transfer = self._transfers[number]
                taken = transfer.take()
                if taken is None:  # another link has taken it
                    self._line = links.offer(self._line, number, *transfer.list_left())
                    continue
                transfer.running += 1
                self._active += 1
                self._line = links.record_begin(self._line, number, taken.length)
                self._speed = links.record_busy(self._speed, self._clock())
                return transfer, taken
            return None

    def _on_finished(self, transfer: LinkLoad, taken: Taken, moved_bytes: int, error: BaseException | None) -> None:
        with self._changed:
            transfer.running -= 1
            self._active -= 1
            if error is not None:
                self._fail(transfer, error)
            else:
                self._line = links.record_end(self._line, transfer.number, taken.length)
                self._line = links.offer(self._line, transfer.number, *transfer.list_left())
                self._moved_bytes += moved_bytes
                self._speed = links.record_bytes(self._speed, moved_bytes, self._clock())
                self._end_if_over(transfer)
            if not self._active and links.find_next(self._line) is None:
                self._speed = links.record_idle(self._speed, self._clock())

    def _fail(self, transfer: LinkLoad, error: BaseException) -> None:
        transfer.abandon(error)
        self._line = links.leave(self._line, transfer.number)
        self._end_if_over(transfer)

    def _end_if_over(self, transfer: LinkLoad) -> None:
        if not transfer.running and transfer.is_exhausted:
            self._line = links.leave(self._line, transfer.number)
            self._transfers.pop(transfer.number, None)
            transfer.on_over()
