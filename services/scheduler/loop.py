"""The loop that owns the cluster's state: events in, decisions persisted, effects out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby

from services.scheduler.adapters import clock
from services.scheduler.adapters.load_traces import LoadTraces
from services.scheduler.adapters.outbox import Outbox
from services.scheduler.adapters.repository import Repository, is_durable
from services.scheduler.domain.busy import is_busy, is_node_lost_soon
from services.scheduler.domain.decide import decide
from services.scheduler.domain.effects import Effect, LoadStarted, ReplyTo, StepDown
from services.scheduler.domain.events import DemandBatch, DemandReceived, Event, LoaderStatusReceived, NodeStatusReceived, Tick
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.changes import Change, Traced, apply
from services.scheduler.domain.state.cluster import ClusterState
from shared.errors import ThawError
from shared.messaging.connection import Connection
from shared.tasks import end

log = logging.getLogger(__name__)
TICK_S = 0.25
IDLE_TICK_S = 1.0
"""Period of ticks while time alone changes nothing."""
PAUSED_S = 1.0
"""A tick this late shows that the process was paused: stopped, or starved of CPU time."""
DECISIONS_PER_TURN = 16
"""Decisions made before other tasks of the process run."""
MAX_UNCOMMITTED = 512
"""Decisions that may wait for the database."""


class SteppedDown(Exception):
    """Another leader has acted under epoch `epoch`."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        super().__init__(f"epoch {epoch} exists")


def merge_demand(events: list[Event]) -> list[Event]:
    """Merge consecutive demand events, so that they are decided together."""
    found: list[Event] = []
    for is_demand, run in groupby(events, key=lambda e: isinstance(e, DemandReceived)):
        some = list(run)
        if is_demand and len(some) > 1:
            demands = tuple(e for e in some if isinstance(e, DemandReceived))
            found.append(DemandBatch(demands[-1].at, demands))
        else:
            found += some
    return found


@dataclass
class _Decided:
    """Decisions that are applied in memory and not in the database yet."""

    events: list[Event] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)


class SchedulerLoop:
    """Decides events one after the other, and commits decisions in groups.

    Decisions made during a transaction are committed together in the next one. Effects are carried
    out after their commit, in order, so that nothing leaves the scheduler that a crash could undo:
    a term that ends before its commit loses its state with it.
    """

    def __init__(self, state: ClusterState, repository: Repository, loads: LoadTraces, policy: Policy) -> None:
        self.state = state
        self.loader_status_received = asyncio.Event()
        self._repository = repository
        self._loads = loads
        self._policy = policy
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._decided = _Decided()
        self._some = asyncio.Event()
        self._few = asyncio.Event()
        self._few.set()
        self._busy = asyncio.Event()

    def post(self, event: Event) -> None:
        self._events.put_nowait(event)

    async def wait_until_idle(self) -> None:
        """Return when no event waits to be decided or committed."""
        await self._events.join()

    async def next_tick(self, connection: Connection) -> Tick:
        """Return the next Tick after `TICK_S`, or up to `IDLE_TICK_S` while the state is idle.

        If the process did not run for a while, the messages that have arrived are handled before
        the Tick, so that their senders do not count as silent. Nor do they while the connection
        does not work; it is probed before a node is lost.
        """
        now = clock.now()
        if not (self._is_busy(now) or self._is_node_lost_soon(now)):
            self._busy.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_TICK_S - TICK_S):
                    await self._busy.wait()
        await asyncio.sleep(TICK_S)
        if clock.now() - now > IDLE_TICK_S + PAUSED_S:
            await asyncio.sleep(IDLE_TICK_S)
        due = clock.now()
        return Tick(due, await connection.find_start(probe=self._is_node_lost_soon(due)))

    def _is_busy(self, now: float) -> bool:
        return is_busy(self.state, now, self._policy, IDLE_TICK_S)

    def _is_node_lost_soon(self, now: float) -> bool:
        return is_node_lost_soon(self.state, now, self._policy, IDLE_TICK_S)

    async def run(self, outbox: Outbox) -> None:
        """Run until cancelled.

        Raises:
            SteppedDown: A newer epoch exists.
            StaleEpoch: Another leader was elected.
            SQLAlchemyError: The database failed.
        """
        tasks = [
            asyncio.create_task(self._decide_all(), name="decide events"),
            asyncio.create_task(self._commit_all(outbox), name="commit decisions"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await end(*tasks)

    async def _decide_all(self) -> None:
        while True:
            await self._few.wait()
            stretch = [await self._events.get()]
            while len(stretch) < DECISIONS_PER_TURN and not self._events.empty():
                stretch.append(self._events.get_nowait())
            for event in merge_demand(stretch):
                self._decide(event)
            if not self._busy.is_set() and self._is_busy(clock.now()):
                self._busy.set()
            if len(self._decided.events) >= MAX_UNCOMMITTED:
                self._few.clear()
            await asyncio.sleep(0)  # a transaction may have finished

    async def _commit_all(self, outbox: Outbox) -> None:
        while True:
            await self._some.wait()
            decided, self._decided = self._decided, _Decided()
            self._some.clear()
            self._few.set()
            if is_durable(decided.changes):
                await self._repository.commit(self.state.epoch, decided.changes)
            outbox.carry_out(decided.effects, clock.now())
            self._notify(decided.events, outbox.node_reported)
            for _ in decided.events:
                self._events.task_done()

    def _decide(self, event: Event) -> None:
        decided = self._decided
        decided.events += event.demands if isinstance(event, DemandBatch) else (event,)
        self._some.set()
        try:
            decision = decide(self.state, event, clock.now(), self._policy)
        except Exception as e:  # the state is unchanged: one event must not end the mesh
            log.exception("failed to decide an event", extra={"event": type(event).__name__})
            for each in event.demands if isinstance(event, DemandBatch) else (event,):
                waiter = getattr(each, "waiter", None)
                if waiter is not None:
                    decided.effects.append(ReplyTo(waiter, ThawError(f"{type(e).__name__} in a decision: {e}").body()))
            return
        for effect in decision.effects:
            if isinstance(effect, StepDown):
                raise SteppedDown(effect.epoch)
        traced = self._trace(decision.effects)
        self.state.absorb(decision.overlay)
        apply(self.state, traced)
        decided.changes += (*decision.changes, *traced)
        decided.effects += decision.effects

    def _trace(self, effects: Iterable[Effect]) -> list[Traced]:
        return [
            Traced(e.plan_id, e.instance_id, parent)
            for e in effects
            if isinstance(e, LoadStarted) and (parent := self._loads.record_started(e)) is not None
        ]

    def _notify(self, batch: list[Event], node_reported: Callable[[str, str], None]) -> None:
        for event in batch:
            if isinstance(event, NodeStatusReceived):
                node_reported(event.status.node, event.status.boot_id)
            elif isinstance(event, LoaderStatusReceived):
                self.loader_status_received.set()
