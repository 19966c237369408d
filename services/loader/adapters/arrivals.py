"""Report the bytes that have arrived, for engines that compute during the load."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial

from shared.contracts.segment import ByteRange, PagesLayout, UnitPages

Arrival = ByteRange | PagesLayout | UnitPages
"""Bytes in host memory; or the address range of a device's units, and then each unit there."""


class Arrivals:
    """Arrivals of one load in one memory, in order. Threads add them; the event loop reads them.

    Attributes:
        is_unreported: The memory is used as a whole, when all is there: there are no arrivals.
    """

    def __init__(self) -> None:
        self.is_unreported = False
        self._lock = threading.Lock()
        self._found: list[Arrival] = []
        self._waiting: list[Callable[[], object]] = []

    def add(self, *arrivals: Arrival) -> None:
        with self._lock:
            self._found.extend(arrivals)
            waiting, self._waiting = self._waiting, []
        for wake in waiting:
            with contextlib.suppress(RuntimeError):  # the reader's event loop is closed
                wake()

    def end_unreported(self) -> None:
        """Set `is_unreported`, and wake the readers."""
        self.is_unreported = True
        self.add()

    def list_after(self, count: int) -> Sequence[Arrival]:
        """Return the arrivals but the first `count`."""
        with self._lock:
            return self._found[count:]

    async def wait_for_more(self, count: int) -> None:
        """Return when there are more than `count` arrivals."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        wake = partial(loop.call_soon_threadsafe, woken.set)
        with self._lock:
            if len(self._found) > count or self.is_unreported:
                return
            self._waiting.append(wake)
        try:
            await woken.wait()
        finally:
            with self._lock:
                if wake in self._waiting:
                    self._waiting.remove(wake)
