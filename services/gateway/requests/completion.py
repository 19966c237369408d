"""How a request ends, and who waits for that or for more of its answer."""

from __future__ import annotations

import asyncio

from shared.errors import ThawError


class Ending:
    """`gone`: its client has left. `over` is set at the end."""

    def __init__(self) -> None:
        self.error: ThawError | None = None
        self.ended = False
        self.ended_at: float | None = None
        self.gone = False
        self.over = asyncio.Event()
        self._waiter: asyncio.Future[None] | None = None

    def _end(self, now: float) -> None:
        self.ended, self.ended_at = True, now
        self.over.set()
        self.wake()

    def wake(self) -> None:
        """Let whoever writes the answer look again."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def changed(self) -> None:
        """Wait for `wake`. One waiter at a time; state is to be looked at before and after."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
