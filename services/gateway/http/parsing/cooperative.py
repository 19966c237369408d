"""Time slices for long work on the event loop.

One large body must not delay other clients.

A thread would not help: the parsers hold the interpreter lock while they run, and a thread of pure
Python takes it from the event loop for 5 ms at a time, several times per event.
"""

from __future__ import annotations

import asyncio
import time

SLICE_BYTES = 64 * 1024
_SLICE_S = 0.005


class TimeSlice:
    """Let the event loop run after every few milliseconds of work."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def pause(self) -> None:
        """Yield to the event loop if this task has used up its slice."""
        if time.perf_counter() - self._since >= _SLICE_S:
            await asyncio.sleep(0)
            self._since = time.perf_counter()
