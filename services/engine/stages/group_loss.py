"""The failure of an engine that may be a stage: of its computing thread, or of its group."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from services.engine.generation.runner import DeviceLost, RunnerLost
from shared.errors import EngineFailed

log = logging.getLogger(__name__)


class GroupLoss:
    """The first reason why a group cannot continue. Create it on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reason: asyncio.Future[str] = self._loop.create_future()
        self._is_orderly = False

    def report(self, reason: str) -> None:
        """Note that a neighbouring stage has ended. Called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._lose, reason)

    def expect_end(self) -> None:
        """The group stops: the end of a neighbour is no failure from now on."""
        self._is_orderly = True

    def _lose(self, reason: str) -> None:
        if not self._reason.done() and not self._is_orderly:
            self._reason.set_result(reason)

    async def wait_for_failure(self, computing: asyncio.Future[None]) -> EngineFailed:
        """Wait until the computing thread has failed, or the group has lost a stage."""
        await asyncio.wait((computing, self._reason), return_when=asyncio.FIRST_COMPLETED)
        error = computing.exception() if computing.done() else None
        if isinstance(error, DeviceLost):
            return EngineFailed(str(error))
        if computing.done() and not isinstance(error, RunnerLost):
            if error is not None:  # the thread also ends when the engine is stopped
                # A process boundary: clients get the error; the scheduler starts another engine.
                log.error("the computing thread failed", exc_info=error)
            return EngineFailed("The engine's computing thread failed. Its log has the cause (`thaw logs`)")
        reason = self._reason.result() if self._reason.done() else str(error)
        return EngineFailed(f"A stage of the group has ended, so the group ends. {reason}")
