"""Prefetch weights with background priority on every link.

A request that loads other weights cancels the prefetches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shared.contracts.loader import PrefetchWeights
from shared.errors import ThawError
from shared.tasks import end

log = logging.getLogger(__name__)
HOLDER = "prefetch:"
Load = Callable[[str, PrefetchWeights], Awaitable[object]]
"""Loads weights for a named holder; returns when every byte is loaded."""


@dataclass
class _Prefetch:
    command: PrefetchWeights
    task: asyncio.Task[None]


class Prefetching:
    """Prefetches in progress, by weights id.

    `release_hold(holder, keep)` ends a hold: it cancels the load, or caches complete weights.
    """

    def __init__(self, load: Load, release_hold: Callable[[str, bool], None]) -> None:
        self._load = load
        self._release_hold = release_hold
        self._running: dict[str, _Prefetch] = {}
        self._count = 0

    def begin(self, command: PrefetchWeights) -> None:
        weights_id = command.card.info.revision
        if weights_id in self._running:
            return
        self._count += 1
        holder = f"{HOLDER}{self._count}"
        task = asyncio.create_task(self._run(holder, command), name=f"prefetch {command.card.name}")
        self._running[weights_id] = _Prefetch(command, task)

    def cancel(self, weights_id: str) -> None:
        if (found := self._running.pop(weights_id, None)) is not None:
            found.task.cancel()

    def yield_to(self, weights_id: str) -> None:
        """Cancel all other prefetches: a request waits for these weights.

        A prefetch of these weights continues at the load's priority.
        """
        for other in [w for w in self._running if w != weights_id]:
            log.info("cancelled a prefetch in favour of a load", extra={"weights": other})
            self.cancel(other)

    async def stop(self) -> None:
        tasks = [u.task for u in self._running.values()]
        self._running.clear()
        await end(*tasks)

    async def _run(self, holder: str, command: PrefetchWeights) -> None:
        weights_id = command.card.info.revision
        try:
            await self._load(holder, command)
        except ThawError as e:
            log.info("failed to prefetch weights", extra={"model": command.card.name, "reason": e.message})
        finally:
            self._release_hold(holder, command.tier == "dram")
            with contextlib.suppress(KeyError):
                if self._running[weights_id].task is asyncio.current_task():
                    del self._running[weights_id]
