"""The end of a request, and the wake-up of its response writer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from shared.errors import ThawError


class Completion:
    """The end of a request, and the wake-up of its response writer.

    Attributes:
        is_done: The request ended: answered, failed, or abandoned by its client.
        done: Set when `is_done` becomes true.
        done_at: Monotonic time of the end.
        error: The reason why the request failed; None while it runs, and if it did not fail.
        has_client_left: The client disconnected before the end.
    """

    def __init__(self, on_done: Callable[[], None]) -> None:
        """Call `on_done` once, when the request ends."""
        self.is_done = False
        self.done = asyncio.Event()
        self.done_at: float | None = None
        self.error: ThawError | None = None
        self.has_client_left = False
        self._on_done = on_done
        self._waiter: asyncio.Future[None] | None = None

    def finish(self, now: float) -> None:
        self.is_done, self.done_at = True, now
        self.done.set()
        self.wake()
        self._on_done()

    def fail(self, error: ThawError) -> None:
        """End with `error`; no-op if the request has ended already."""
        if not self.is_done:
            self.error = error
            self.finish(time.monotonic())

    def wake(self) -> None:
        """Wake the task that waits in `wait_for_wake`."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait_for_wake(self) -> None:
        """Wait for `wake`. Only one task may wait; it checks the state before and after."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
