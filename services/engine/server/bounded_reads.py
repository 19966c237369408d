"""Requests whose reading compiles a grammar: on a thread of their own, in bounded time.

The grammar library bounds its work itself. The time-out is for what its limits do not cover.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

log = logging.getLogger(__name__)
R = TypeVar("R")


class BoundedReads:
    """Runs one read at a time. Use it on one event loop."""

    def __init__(self, within_s: float) -> None:
        """Create it without a thread, which starts with the first read.

        Args:
            within_s: Seconds that one read may take once it runs.
        """
        self._within_s = within_s
        self._thread: ThreadPoolExecutor | None = None
        self._is_closed = False

    async def run(self, read: Callable[[], R], *, prepare: Callable[[], object]) -> R:
        """Run `prepare`, then `read`, on the thread.

        Args:
            read: The bounded work.
            prepare: Work that no request can make longer.

        Raises:
            TimeoutError: `read` took too long. Its thread is abandoned.
        """
        while True:
            thread, job = await self._begin(read, prepare)
            if job.cancelled() and not self._is_closed:
                continue  # its thread was abandoned before its turn
            try:
                return await asyncio.wait_for(asyncio.shield(job), self._within_s)
            except TimeoutError:
                log.warning("abandoned the compilation of a grammar")
                thread.shutdown(wait=False, cancel_futures=True)
                if self._thread is thread:
                    self._thread = None
                raise

    async def _begin(self, read: Callable[[], R], prepare: Callable[[], object]) -> tuple[ThreadPoolExecutor, asyncio.Future[R]]:
        """Return the thread and its job once `read` runs, or the job has ended otherwise."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        thread = self._thread

        def begin() -> None:
            if not started.done():
                started.set_result(None)

        def work() -> R:
            prepare()
            loop.call_soon_threadsafe(begin)
            return read()

        def end(done: asyncio.Future[R]) -> None:
            begin()
            if not done.cancelled():
                done.exception()  # taken here, in case the caller was cancelled

        job = loop.run_in_executor(thread, work)
        job.add_done_callback(end)
        await started
        return thread, job

    def close(self) -> None:
        """End the thread, without waiting for it."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
