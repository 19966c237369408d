"""Prefetch weights with background priority on every link.

A request that loads other weights cancels the prefetches. `statuses` has the running prefetches and
the latest outcomes, by the token of their command.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from shared.contracts.loader import PREFETCH_HOLDER, PrefetchStatus, PrefetchWeights
from shared.contracts.models import ModelCard
from shared.errors import InsufficientMemory, ThawError
from shared.tasks import end

log = logging.getLogger(__name__)
OUTCOMES_KEPT = 32
Load = Callable[[str, ModelCard], Awaitable[object]]
"""Loads weights for a named holder; returns when every byte is loaded."""


class Disk(Protocol):
    """The cache of remote models on the node's disk."""

    async def check_room(self, card: ModelCard) -> None:
        """Raise `StoreFull` if the disk could not hold the model even after evictions."""

    async def write(self, card: ModelCard) -> None:
        """Return when the disk has the model, fetching what it lacks.

        Raises `StoreFull` if it will not have the model.
        """


@dataclass
class _Prefetch:
    """One prefetch, and the commands that wait for it, the first one first."""

    commands: list[PrefetchWeights]
    task: asyncio.Task[None] | None = field(default=None)

    def wants(self, tier: str) -> bool:
        return any(c.tier == tier for c in self.commands)


class Prefetching:
    """Prefetches in progress, by weights id.

    `release_hold(holder, keep)` ends a hold: it cancels the load, or caches complete weights.
    """

    def __init__(self, load: Load, disk: Disk, release_hold: Callable[[str, bool], None]) -> None:
        self._load, self._disk, self._release_hold = load, disk, release_hold
        self._running: dict[str, _Prefetch] = {}
        self._ended: deque[PrefetchStatus] = deque(maxlen=OUTCOMES_KEPT)
        self._count = 0

    def begin(self, command: PrefetchWeights) -> None:
        weights_id = command.card.info.revision
        if (running := self._running.get(weights_id)) is not None:
            running.commands.append(command)
            return
        self._count += 1
        prefetch = self._running[weights_id] = _Prefetch([command])
        prefetch.task = asyncio.create_task(
            self._run(f"{PREFETCH_HOLDER}{self._count}", prefetch), name=f"prefetch {command.card.name}"
        )

    def cancel(self, weights_id: str) -> None:
        if (found := self._running.pop(weights_id, None)) is not None and found.task is not None:
            found.task.cancel()

    def yield_to(self, weights_id: str) -> None:
        """Cancel all other prefetches: a request waits for these weights.

        A prefetch of these weights continues at the load's priority.
        """
        for other in [w for w in self._running if w != weights_id]:
            log.info("cancelled a prefetch in favour of a load", extra={"weights": other})
            self._record(self._running[other], PrefetchStatus(token=0, weights_id=other, state="preempted"))
            self.cancel(other)

    def statuses(self) -> tuple[PrefetchStatus, ...]:
        """Return the latest outcomes, oldest first, and then the running prefetches."""
        running = [
            PrefetchStatus(token=c.token, weights_id=w, state="running") for w, p in self._running.items() for c in p.commands
        ]
        return (*self._ended, *running)

    async def stop(self) -> None:
        tasks = [p.task for p in self._running.values() if p.task is not None]
        self._running.clear()
        await end(*tasks)

    def _record(self, prefetch: _Prefetch, outcome: PrefetchStatus) -> None:
        self._ended.extend(outcome.model_copy(update={"token": c.token}) for c in prefetch.commands)

    async def _run(self, holder: str, prefetch: _Prefetch) -> None:
        card = prefetch.commands[0].card
        weights_id = card.info.revision
        outcome = PrefetchStatus(token=0, weights_id=weights_id, state="failed")
        try:
            await self._bring(holder, card, prefetch)
            outcome = outcome.model_copy(update={"state": "complete"})
        except ThawError as e:
            log.info("failed to prefetch weights", extra={"model": card.name, "reason": e.message})
            outcome = outcome.model_copy(update={"error": e.body()})
        except Exception as e:  # the task's boundary
            log.exception("failed to prefetch weights", extra={"model": card.name})
            outcome = outcome.model_copy(update={"error": ThawError(f"{type(e).__name__} while prefetching: {e}").body()})
        finally:
            if self._running.get(weights_id) is prefetch:
                del self._running[weights_id]
                self._record(prefetch, outcome)
            self._release_hold(holder, prefetch.wants("dram"))

    async def _bring(self, holder: str, card: ModelCard, prefetch: _Prefetch) -> None:
        """Load the weights, and write them to the disk from there.

        Only a prefetch to the disk needs no memory: without room for the weights they are fetched
        to the disk piece by piece.
        """
        if not prefetch.wants("dram"):
            await self._disk.check_room(card)
        try:
            await self._load(holder, card)
        except InsufficientMemory:
            if prefetch.wants("dram"):
                raise
        if prefetch.wants("ssd"):
            await self._disk.write(card)
