"""Populate a load's memory ahead of its readers (ADR 0059).

A reader that touches fresh memory waits until the kernel has zeroed it, on a virtual machine also
for the host's memory, and its disk is idle meanwhile. Instead, a few threads populate the memory in
the order of the reads, at most `AHEAD` pieces beyond the last one that a reader asked for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from weights.formats.segment import pages
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.region import Space
from weights.tiers.port import Cancelled
from weights.transfer.page_sizes import AHEAD, Costs, choose, record_cost, wants_thread
from weights.transfer.pieces import Piece

_PROBE_BYTES = 4 * 1024 * 1024


class Populating:
    """Threads that populate the memory of `pieces`, which are in the order of the reads.

    They start with the first `wait`.

    Attributes:
        seconds: Time spent populating, over all threads.
    """

    def __init__(self, pieces: Sequence[Piece], region: Space, most_threads: int | None = None) -> None:
        self._pieces, self._region = pieces, region
        self._places = {piece.index: place for place, piece in enumerate(pieces)}
        self._most = most_threads or len(os.sched_getaffinity(0))
        self._changed = threading.Condition()
        self._done = bytearray(len(pieces))
        self._next, self._wanted = 0, -1
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._closed = False
        self.costs = Costs()
        self.seconds = 0.0

    @property
    def uses_small_pages(self) -> bool:
        """True if the measurements favour small pages."""
        return choose(self.costs) == "small" and (self.costs.refused or self.costs.small is not None)

    # -- the readers -------------------------------------------------------------------------------

    def wait(self, piece: Piece) -> None:
        """Wait until the piece has memory.

        Raises:
            InsufficientMemory: Shared memory is full.
            Cancelled: `close` was called.
        """
        place = self._places[piece.index]
        with self._changed:
            self._wanted = max(self._wanted, place)
            if self._done[place]:
                self._changed.notify_all()
                return
            if not self._closed and self._error is None and wants_thread(len(self._threads), self._most, self._next):
                thread = threading.Thread(target=self._work, name="populate", daemon=True)
                thread.start()
                self._threads.append(thread)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done[place] or self._error is not None or self._closed)
            if not self._done[place]:
                raise self._error or Cancelled

    def skip(self, piece: Piece) -> None:
        """Record that these threads need not populate the piece."""
        with self._changed:
            self._done[self._places[piece.index]] = 1

    def close(self) -> None:
        """End the threads after the pieces they populate."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # -- the populating threads --------------------------------------------------------------------

    def _work(self) -> None:
        while (place := self._take()) is not None:
            error: BaseException | None = None
            began = time.perf_counter()
            try:
                self._populate(self._pieces[place])
            except BaseException as e:  # the thread's boundary: the readers need the error
                error = e
            with self._changed:
                self.seconds += time.perf_counter() - began
                self._error = self._error or error
                self._done[place] = error is None
                self._changed.notify_all()

    def _take(self) -> int | None:
        with self._changed:
            while not self._closed and self._error is None:
                while self._next < len(self._pieces) and self._done[self._next]:
                    self._next += 1
                if self._next == len(self._pieces):
                    return None
                if self._next <= self._wanted + AHEAD:
                    self._next += 1
                    return self._next - 1
                self._changed.wait()
            return None

    def _populate(self, piece: Piece) -> None:
        at, end = piece.target, piece.target + pages(piece.length)
        while at < end:
            with self._changed:
                costs = self.costs
            probing = not costs.refused and (costs.huge is None or costs.small is None)
            # A probe ends on a border of huge pages.
            border = at // _PROBE_BYTES * _PROBE_BYTES + _PROBE_BYTES if probing else at // CHUNK_BYTES * CHUNK_BYTES + CHUNK_BYTES
            length = min(end, border) - at
            asked = choose(costs)
            began = time.perf_counter()
            got = self._region.populate(at, length, huge=asked == "huge")
            if got is not None and length >= _PROBE_BYTES:  # it has a whole huge page
                with self._changed:
                    self.costs = record_cost(self.costs, asked, got, length, time.perf_counter() - began)
            at += length
