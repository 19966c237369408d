"""By the engine's own means: vLLM's and SGLang's sleep, Ollama's unload. A 200 proves nothing: memory is read back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from services.nodeagent.devices.cpu import available_bytes
from services.nodeagent.domain.state import Outlook
from services.nodeagent.suspend.estimates import Rates
from services.nodeagent.suspend.memory import footprint
from services.nodeagent.suspend.memory_usage import Gauge
from services.nodeagent.suspend.port import UNPROVABLE, Taken, Target
from shared.contracts.engine import EngineAsleep
from shared.contracts.node import SuspendWay
from shared.errors import CannotSuspend, ThawError

log = logging.getLogger(__name__)
_LEAST_FREED = 0.1
_FREED_WITHIN_S = 5.0
_POLL_S = 0.1
_AGAIN = 3
"""Reading weights again takes so many times as long as copying them from host memory, until a round has measured it."""
Sleep = Callable[[str, int], Awaitable[EngineAsleep]]


class SleepWay:
    """`sleep(instance_id, level)` asks the engine's host. Level 1 (weights to host memory) where the engine has it and they are within
    `budget` and in the memory that is free, else 2 (weights read again)."""

    name: SuspendWay = "sleep"

    def __init__(self, gauge: Gauge, sleep: Sleep, budget: int) -> None:
        self._gauge = gauge
        self._sleep = sleep
        self._budget = budget
        self._rates = Rates(left=0.2, resume_bytes_per_s=5e9, least_resume_s=0.3)

    def unavailable(self) -> str:
        return ""

    def outlook(self, target: Target) -> Outlook:
        if not target.sleep_levels:
            return Outlook(reason=f"{target.engine} has no sleep of its own here")
        used = self._gauge.used(target)
        if used == 0:
            return Outlook(reason=UNPROVABLE)
        left = int(used * self._rates.left)
        # On cpu what lies in swap is given up and made again as well.
        moved = self._gauge.held(target) - left
        keeps = target.on_cuda and self._level(target, moved) == 1
        took = self._rates.resume_s(moved if keeps else moved * _AGAIN)
        return Outlook(way="sleep", left_bytes=left, snapshot_bytes=moved if keeps else 0, resume_s=took)

    async def suspend(self, target: Target) -> Taken:
        used = await asyncio.to_thread(self._gauge.used, target)
        if used == 0:
            raise CannotSuspend(UNPROVABLE)
        host = await asyncio.to_thread(footprint, target.pids)
        try:
            await self._sleep(target.instance_id, self._level(target, int(used * (1 - self._rates.left))))
        except ThawError as e:
            raise CannotSuspend(f"the engine would not sleep: {e.message}") from e
        left = await self._settled(target, used)
        if used - left < _LEAST_FREED * used:
            raise CannotSuspend(f"the engine says that it sleeps, and {left >> 20} of {used >> 20} MiB are still in use")
        now = await asyncio.to_thread(footprint, target.pids)
        self._rates = self._rates.suspended(used, left)
        return Taken(used, left, max(0, now.pss - host.pss) if target.on_cuda else 0)

    async def _settled(self, target: Target, used: int) -> int:
        """What is in use once it falls no more: drivers give memory back a little later than they say."""
        deadline = asyncio.get_running_loop().time() + _FREED_WITHIN_S
        last = used
        while True:
            left = await asyncio.to_thread(self._gauge.used, target)
            if (left < used and left >= last) or asyncio.get_running_loop().time() > deadline:
                return left
            last = left
            await asyncio.sleep(_POLL_S)

    async def resume(self, target: Target) -> None:
        """Waking it, which every way ends with, is all there is to do."""

    def forget(self, instance_id: str) -> None:
        """Nothing is kept of one instance alone."""

    def learn(self, snapshot_bytes: int, took_s: float) -> None:
        self._rates = self._rates.resumed(snapshot_bytes, took_s)

    def _level(self, target: Target, moved: int) -> int:
        if 2 in target.sleep_levels and moved > min(self._budget, available_bytes()):
            return 2
        return min(target.sleep_levels)
