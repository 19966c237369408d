"""Requests whose reading compiles a grammar: on a thread of their own, in bounded time.

The grammar library bounds its work itself. The time-out is for what its limits do not cover.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)
R = TypeVar("R")
_MOST_ABANDONED = 4
"""Abandoned reads that may still run. Each takes a core from the engine."""


@dataclass(frozen=True)
class _Turn(Generic[R]):
    """A queued read.

    Attributes:
        job: The read on its thread.
        started: Done when it runs, or has ended otherwise.
        expired: Done when it has run for too long.
    """

    job: Future[R]
    started: asyncio.Future[None]
    expired: asyncio.Future[None]


class BoundedReads:
    """Runs one read at a time. Use it on one event loop."""

    def __init__(self, within_s: float) -> None:
        """Create a runner without a thread: the first read starts one.

        Args:
            within_s: Seconds that one read may take once it runs.
        """
        self._within_s = within_s
        self._thread: ThreadPoolExecutor | None = None
        self._abandoned: dict[Future[Any], asyncio.Future[None]] = {}
        """Abandoned reads that still run, with futures of their ends."""
        self._is_closed = False

    async def run(self, read: Callable[[], R], *, prepare: Callable[[], object]) -> R:
        """Run `prepare`, then `read`, on the thread.

        Args:
            read: The bounded work.
            prepare: Work that no request can make longer.

        Raises:
            TimeoutError: `read` took too long, and its thread is abandoned. Or too many abandoned
                reads still run.
        """
        while True:
            async with asyncio.timeout(self._within_s):
                while len(self._abandoned) >= _MOST_ABANDONED:
                    await asyncio.wait(self._abandoned.values(), return_when=asyncio.FIRST_COMPLETED)
            turn = self._begin(read, prepare)
            try:
                await turn.started
            except asyncio.CancelledError:
                turn.job.cancel()  # no effect once it runs
                raise
            if turn.job.cancelled() and not self._is_closed:
                continue  # its thread was abandoned before its turn
            done = asyncio.wrap_future(turn.job)
            done.add_done_callback(lambda each: each.cancelled() or each.exception())  # its caller may have been cancelled
            await asyncio.wait((done, turn.expired), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise TimeoutError
            return done.result()

    def _begin(self, read: Callable[[], R], prepare: Callable[[], object]) -> _Turn[R]:
        """Queue a read. A slow one's thread is abandoned, whether its caller waits or not."""
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        thread = self._thread
        started: asyncio.Future[None] = loop.create_future()
        expired: asyncio.Future[None] = loop.create_future()
        timer: asyncio.TimerHandle | None = None

        def begin() -> None:
            nonlocal timer
            if timer is None:
                timer = loop.call_later(self._within_s, lambda: self._abandon(thread, job, expired))
            if not started.done():
                started.set_result(None)

        def work() -> R:
            prepare()
            loop.call_soon_threadsafe(begin)
            return read()

        def end() -> None:
            begin()
            if timer is not None:
                timer.cancel()
            if (left := self._abandoned.pop(job, None)) is not None:
                left.set_result(None)

        def on_done(_: Future[R]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end)

        job = thread.submit(work)
        job.add_done_callback(on_done)
        return _Turn(job, started, expired)

    def _abandon(self, thread: ThreadPoolExecutor, job: Future[Any], expired: asyncio.Future[None]) -> None:
        """Abandon a thread whose job takes too long."""
        log.warning("abandoned the compilation of a grammar")
        thread.shutdown(wait=False, cancel_futures=True)
        if self._thread is thread:
            self._thread = None
        self._abandoned[job] = asyncio.get_running_loop().create_future()
        expired.set_result(None)

    def close(self) -> None:
        """End the thread, without waiting for it."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
