"""Prefetch weights with background priority on every link.

A request that loads other weights cancels the prefetches. `statuses` has the running prefetches
with their progress, and the latest outcomes, by the token of their command.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from shared.contracts.loader import PREFETCH_HOLDER, PrefetchStatus, PrefetchWeights
from shared.contracts.models import ModelCard
from shared.errors import InsufficientMemory, ThawError
from shared.tasks import end

log = logging.getLogger(__name__)
OUTCOMES_KEPT = 32
RATE_WINDOW_S = 10.0
"""The rate of a prefetch is that of this time, or since its beginning."""
_SHORTEST_S = 0.5
"""No rate is computed over a shorter time."""
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


@dataclass(frozen=True)
class Arrived:
    """Bytes of weights that have arrived on the node, of `total_bytes` (0: not known yet)."""

    loaded_bytes: int = 0
    total_bytes: int = 0


class TransferRate:
    """The rate of a transfer over the last seconds, from samples of its bytes."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def measure(self, now: float, nbytes: int) -> float | None:
        """Add a sample, and return bytes per second; None: not known yet."""
        if self._samples and nbytes < self._samples[-1][1]:
            self._samples.clear()  # another transfer
        self._samples.append((now, nbytes))
        while len(self._samples) > 1 and now - self._samples[1][0] >= RATE_WINDOW_S:
            self._samples.popleft()
        first_at, first_bytes = self._samples[0]
        elapsed_s = now - first_at
        return (nbytes - first_bytes) / elapsed_s if elapsed_s >= _SHORTEST_S else None


@dataclass
class _Prefetch:
    """One prefetch, and the commands that wait for it, the first one first.

    Attributes:
        commands: The commands.
        task: Runs the prefetch.
        writing: Fetches to the disk what the load did not leave there.
        rate: Bytes per second.
        has_room: False: memory lacked room for the load. Only the disk gets the weights.
    """

    commands: list[PrefetchWeights]
    task: asyncio.Task[None] | None = None
    writing: asyncio.Task[None] | None = None
    rate: TransferRate = field(default_factory=TransferRate)
    has_room: bool = True

    def wants(self, tier: str) -> bool:
        return any(c.tier == tier for c in self.commands)

    def add(self, command: PrefetchWeights) -> None:
        """Add a command, in place of an earlier one of the same model and tier."""
        same = (command.card.name, command.tier)
        self.commands = [*(c for c in self.commands if (c.card.name, c.tier) != same), command]

    def drop(self, token: int) -> None:
        self.commands = [c for c in self.commands if c.token != token]

    def take(self, tier: str) -> list[PrefetchWeights]:
        """Remove the commands of a tier, and return them."""
        found = [c for c in self.commands if c.tier == tier]
        self.commands = [c for c in self.commands if c.tier != tier]
        return found


class Prefetching:
    """Prefetches in progress, by weights id."""

    def __init__(
        self,
        load: Load,
        disk: Disk,
        release_hold: Callable[[str, bool], None],
        measure: Callable[[str], Arrived],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without prefetches.

        Args:
            load: Loads weights into memory.
            disk: The disk cache.
            release_hold: `release_hold(holder, keep)` ends a hold: it cancels the load, or caches
                complete weights.
            measure: `measure(weights_id)` returns the bytes of a running prefetch.
            clock: Monotonic seconds.
        """
        self._load, self._disk, self._release_hold = load, disk, release_hold
        self._measure, self._clock = measure, clock
        self._running: dict[str, _Prefetch] = {}
        self._ended: deque[PrefetchStatus] = deque(maxlen=OUTCOMES_KEPT)
        self._count = 0

    def begin(self, command: PrefetchWeights) -> None:
        weights_id = command.card.info.revision
        if (running := self._running.get(weights_id)) is not None:
            running.add(command)
            return
        self._count += 1
        prefetch = self._running[weights_id] = _Prefetch([command])
        prefetch.task = asyncio.create_task(
            self._run(f"{PREFETCH_HOLDER}{self._count}", prefetch), name=f"prefetch {command.card.name}"
        )

    def cancel(self, weights_id: str, token: int | None = None) -> None:
        """Cancel a prefetch; with `token` only that command, if others wait for the weights."""
        found = self._running.get(weights_id)
        if found is None:
            return
        if token is not None:
            if all(c.token != token for c in found.commands):
                return
            found.drop(token)
        if token is None or not found.commands:
            del self._running[weights_id]
            if found.task is not None:
                found.task.cancel()
        elif found.writing is not None and not found.wants("ssd"):
            found.writing.cancel()

    def yield_to(self, weights_id: str) -> None:
        """Cancel all other prefetches: a request waits for these weights.

        A prefetch of these weights continues at the load's priority.
        """
        for other in [w for w in self._running if w != weights_id]:
            log.info("cancelled a prefetch in favour of a load", extra={"weights": other})
            self._record(self._running[other].commands, PrefetchStatus(token=0, weights_id=other, state="preempted"))
            self.cancel(other)

    def statuses(self) -> tuple[PrefetchStatus, ...]:
        """Return the latest outcomes, oldest first, and then the running prefetches."""
        running = [status for weights_id, prefetch in self._running.items() for status in self._report(weights_id, prefetch)]
        return (*self._ended, *running)

    def _report(self, weights_id: str, prefetch: _Prefetch) -> list[PrefetchStatus]:
        arrived = self._measure(weights_id)
        rate = prefetch.rate.measure(self._clock(), arrived.loaded_bytes)
        return [
            PrefetchStatus(
                token=c.token,
                weights_id=weights_id,
                state="running",
                loaded_bytes=arrived.loaded_bytes,
                total_bytes=arrived.total_bytes,
                bytes_per_second=rate,
            )
            for c in prefetch.commands
        ]

    async def stop(self) -> None:
        tasks = [p.task for p in self._running.values() if p.task is not None]
        self._running.clear()
        await end(*tasks)

    def _record(self, commands: Iterable[PrefetchWeights], outcome: PrefetchStatus) -> None:
        self._ended.extend(outcome.model_copy(update={"token": c.token}) for c in commands)

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
            later: list[PrefetchWeights] = []
            if self._running.get(weights_id) is prefetch:
                del self._running[weights_id]
                if not prefetch.has_room:  # those after the load had failed
                    later = prefetch.take("dram")
                self._record(prefetch.commands, outcome)
            self._release_hold(holder, prefetch.wants("dram"))
            for command in later:
                self.begin(command)

    async def _bring(self, holder: str, card: ModelCard, prefetch: _Prefetch) -> None:
        """Load the weights, and write them to the disk from there.

        Only a prefetch to the disk needs no memory: without room for the weights they are fetched
        to the disk piece by piece.
        """
        if not prefetch.wants("dram"):
            try:
                await self._disk.check_room(card)
            except ThawError as e:
                if not prefetch.wants("dram"):
                    raise
                self._fail(prefetch, "ssd", e)  # a command for memory has joined meanwhile
        try:
            await self._load(holder, card)
        except InsufficientMemory as e:
            if not prefetch.wants("ssd"):
                raise
            prefetch.has_room = False
            self._fail(prefetch, "dram", e)
        if prefetch.wants("ssd"):
            try:
                await self._write(card, prefetch)
            except ThawError as e:
                if not (prefetch.has_room and prefetch.wants("dram")):
                    raise
                self._fail(prefetch, "ssd", e)  # memory has the weights

    def _fail(self, prefetch: _Prefetch, tier: Literal["ssd", "dram"], error: ThawError) -> None:
        """Record the commands of one tier as failed; the prefetch continues for the others."""
        weights_id = prefetch.commands[0].card.info.revision
        failed = PrefetchStatus(token=0, weights_id=weights_id, state="failed", error=error.body())
        self._record(prefetch.take(tier), failed)

    async def _write(self, card: ModelCard, prefetch: _Prefetch) -> None:
        """Write the weights to the disk, as long as a command wants them there."""
        prefetch.writing = asyncio.create_task(self._disk.write(card), name=f"write {card.name}")
        try:
            await prefetch.writing
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if prefetch.wants("ssd") or (task is not None and task.cancelling()):
                raise
        finally:
            prefetch.writing = None
