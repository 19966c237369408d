"""Suspends engines by their own API: sleep of vLLM and SGLang, unload of Ollama.

Memory is measured afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from services.nodeagent.devices.cpu import available_bytes
from services.nodeagent.domain.state import Outlook
from services.nodeagent.suspend.estimates import SuspendEstimates
from services.nodeagent.suspend.memory import footprint
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import UNPROVABLE, SuspendResult, Target
from shared.contracts.engine import EngineAsleep
from shared.contracts.node import SuspendWay
from shared.errors import CannotSuspend, ThawError

log = logging.getLogger(__name__)
_LEAST_FREED = 0.1
_FREED_WITHIN_S = 5.0
_POLL_S = 0.1
_AGAIN = 3
"""Reading weights again takes this many times as long as copying them from host memory, until
measured.
"""
Sleep = Callable[[str, int], Awaitable[EngineAsleep]]


class EngineSleep:
    """Suspends engines by their own sleep.

    `sleep(instance_id, level)` asks the engine's host. Level 1 (weights to host memory) is used if
    the engine has it and the weights fit `budget` and the free memory, else level 2 (weights are
    read again).
    """

    name: SuspendWay = "sleep"

    def __init__(self, memory_usage: MemoryUsage, sleep: Sleep, budget: int) -> None:
        self._memory_usage = memory_usage
        self._sleep = sleep
        self._budget = budget
        self._estimates = SuspendEstimates(left=0.2, resume_bytes_per_s=5e9, least_resume_s=0.3)

    def explain_unavailable(self) -> str:
        return ""

    def outlook(self, target: Target) -> Outlook:
        if not target.sleep_levels:
            return Outlook(reason=f"{target.engine} has no sleep API here")
        used = self._memory_usage.used_bytes(target)
        if used == 0:
            return Outlook(reason=UNPROVABLE)
        left = int(used * self._estimates.left)
        # On cpu memory in swap is freed and recreated as well.
        moved = self._memory_usage.used_bytes_with_swap(target) - left
        keeps = target.on_cuda and self._level(target, moved) == 1
        took = self._estimates.resume_s(moved if keeps else moved * _AGAIN)
        return Outlook(way="sleep", left_bytes=left, snapshot_bytes=moved if keeps else 0, resume_s=took)

    async def suspend(self, target: Target) -> SuspendResult:
        used = await asyncio.to_thread(self._memory_usage.used_bytes, target)
        if used == 0:
            raise CannotSuspend(UNPROVABLE)
        host = await asyncio.to_thread(footprint, target.pids)
        try:
            await self._sleep(target.instance_id, self._level(target, int(used * (1 - self._estimates.left))))
        except ThawError as e:
            raise CannotSuspend(f"The engine refused to sleep: {e.message}") from e
        left = await self._wait_until_settled(target, used)
        if used - left < _LEAST_FREED * used:
            raise CannotSuspend(f"The engine reports that it sleeps, but {left >> 20} of {used >> 20} MiB are still in use")
        now = await asyncio.to_thread(footprint, target.pids)
        self._estimates = self._estimates.learn_suspended(used, left)
        return SuspendResult(used, left, max(0, now.pss - host.pss) if target.on_cuda else 0)

    async def _wait_until_settled(self, target: Target, used: int) -> int:
        """Memory in use once enough is free and it no longer falls.

        Drivers free memory shortly after they report it. On cpu it also falls a little when another
        process maps the same files.
        """
        deadline = asyncio.get_running_loop().time() + _FREED_WITHIN_S
        last = used
        while True:
            left = await asyncio.to_thread(self._memory_usage.used_bytes, target)
            is_freed = used - left >= _LEAST_FREED * used
            if (is_freed and left >= last) or asyncio.get_running_loop().time() > deadline:
                return left
            last = left
            await asyncio.sleep(_POLL_S)

    async def resume(self, target: Target) -> None:
        """No-op: every resume ends with waking the engine."""

    def forget(self, instance_id: str) -> None:
        """No-op: there is no state per instance."""

    def rename(self, old: str, new: str) -> None:
        """No-op: there is no state per instance."""

    def learn(self, snapshot_bytes: int, took_s: float) -> None:
        self._estimates = self._estimates.learn_resumed(snapshot_bytes, took_s)

    def _level(self, target: Target, moved: int) -> int:
        if 2 in target.sleep_levels and moved > min(self._budget, available_bytes()):
            return 2
        return min(target.sleep_levels)
