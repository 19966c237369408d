"""Weights brought ahead of anybody: held by nobody but this, behind everything else on each link, dropped when somebody waits."""

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
Bring = Callable[[str, PrefetchWeights], Awaitable[object]]
"""Brings the weights, held by a name; returns when every byte is there."""


@dataclass
class _Under:
    command: PrefetchWeights
    task: asyncio.Task[None]


class Prefetching:
    """What is under way, by weights. `let_go(holder, keep)` ends a hold: the load is called off, or what is complete is cached (or not)."""

    def __init__(self, bring: Bring, let_go: Callable[[str, bool], None]) -> None:
        self._bring = bring
        self._let_go = let_go
        self._under: dict[str, _Under] = {}
        self._count = 0

    def begin(self, command: PrefetchWeights) -> None:
        weights_id = command.card.info.revision
        if weights_id in self._under:
            return
        self._count += 1
        holder = f"{HOLDER}{self._count}"
        task = asyncio.create_task(self._run(holder, command), name=f"prefetch {command.card.name}")
        self._under[weights_id] = _Under(command, task)

    def cancel(self, weights_id: str) -> None:
        if (found := self._under.pop(weights_id, None)) is not None:
            found.task.cancel()

    def make_way(self, weights_id: str) -> None:
        """Somebody waits for these weights: everything else is dropped. A prefetch of themselves goes on, as fast as any load."""
        for other in [w for w in self._under if w != weights_id]:
            log.info("a prefetch made way for a load", extra={"weights": other})
            self.cancel(other)

    async def stop(self) -> None:
        tasks = [u.task for u in self._under.values()]
        self._under.clear()
        await end(*tasks)

    async def _run(self, holder: str, command: PrefetchWeights) -> None:
        weights_id = command.card.info.revision
        try:
            await self._bring(holder, command)
        except ThawError as e:
            log.info("weights were not prefetched", extra={"model": command.card.name, "reason": e.message})
        finally:
            self._let_go(holder, command.tier == "dram")
            with contextlib.suppress(KeyError):
                if self._under[weights_id].task is asyncio.current_task():
                    del self._under[weights_id]
