"""The loop that owns the cluster's state: events in, decisions persisted, effects out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from services.scheduler.adapters import clock
from services.scheduler.adapters.loads import Loads
from services.scheduler.adapters.outbox import Outbox
from services.scheduler.adapters.repository import Repository, durable
from services.scheduler.domain.decide import decide
from services.scheduler.domain.effects import Effect, LoadStarted, ReplyTo, StepDown
from services.scheduler.domain.events import Event, LoaderStatusHeard, NodeStatusHeard
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state import Change, ClusterState, Traced, apply
from shared.errors import ThawError

log = logging.getLogger(__name__)
MAX_BATCH = 256


class SteppedDown(Exception):
    """Another leader has acted under epoch `epoch`."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        super().__init__(f"epoch {epoch} has been seen")


class SchedulerLoop:
    """Events of one batch are decided one after the other and committed in one transaction; then their effects are carried out."""

    def __init__(self, state: ClusterState, repository: Repository, loads: Loads, policy: Policy) -> None:
        self.state = state
        self.loader_heard = asyncio.Event()
        self._repository = repository
        self._loads = loads
        self._policy = policy
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def post(self, event: Event) -> None:
        self._events.put_nowait(event)

    async def idle(self) -> None:
        """Return when nothing waits to be decided."""
        await self._events.join()

    async def run(self, outbox: Outbox) -> None:
        """Until cancelled. Raises `SteppedDown`, `Deposed` or the database's error when this leader's term is over."""
        while True:
            batch = [await self._events.get()]
            while len(batch) < MAX_BATCH and not self._events.empty():
                batch.append(self._events.get_nowait())
            changes: list[Change] = []
            effects: list[Effect] = []
            for event in batch:
                self._decide(event, changes, effects)
            for effect in effects:
                if isinstance(effect, StepDown):
                    raise SteppedDown(effect.epoch)
            if durable(changes):
                await self._repository.commit(self.state.epoch, changes)
            outbox.carry_out(effects, clock.now())
            self._notify(batch, outbox.heard)
            for _ in batch:
                self._events.task_done()

    def _decide(self, event: Event, changes: list[Change], effects: list[Effect]) -> None:
        try:
            decision = decide(self.state, event, clock.now(), self._policy)
        except Exception as e:  # the state is as before: one event must not end the mesh
            log.exception("an event could not be decided", extra={"event": type(event).__name__})
            waiter = getattr(event, "waiter", None)
            if waiter is not None:
                effects.append(ReplyTo(waiter, ThawError(f"{type(e).__name__} while deciding: {e}").body()))
            return
        traced = self._trace(decision.effects)
        self.state.absorb(decision.above)
        apply(self.state, traced)
        changes += (*decision.changes, *traced)
        effects += decision.effects

    def _trace(self, effects: Iterable[Effect]) -> list[Traced]:
        return [
            Traced(e.plan_id, e.instance_id, parent)
            for e in effects
            if isinstance(e, LoadStarted) and (parent := self._loads.started(e)) is not None
        ]

    def _notify(self, batch: list[Event], heard: Callable[[str], None]) -> None:
        for event in batch:
            if isinstance(event, NodeStatusHeard):
                heard(event.status.node)
            elif isinstance(event, LoaderStatusHeard):
                self.loader_heard.set()
