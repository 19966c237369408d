"""Long work on the event loop in slices, so that no client's body holds up the others.

A thread would not help: the parsers keep the interpreter lock while they run, and a thread of pure Python takes it from the loop for
5 ms at a time, several times for each event.
"""

from __future__ import annotations

import asyncio
import time

SLICE_BYTES = 64 * 1024
_SLICE_S = 0.005


class Pace:
    """Lets the event loop run after every few milliseconds of work."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def rest(self) -> None:
        """Yield to the event loop if this task has held it for its slice."""
        if time.perf_counter() - self._since >= _SLICE_S:
            await asyncio.sleep(0)
            self._since = time.perf_counter()
