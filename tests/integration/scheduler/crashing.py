"""A scheduler that crashes at its k-th step, with a real database and fake nodes.

A successor takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from services.scheduler.adapters import clock
from services.scheduler.adapters.database import plain_url
from services.scheduler.adapters.leadership import leadership
from services.scheduler.adapters.load_traces import LoadTraces
from services.scheduler.adapters.outbox import Outbox
from services.scheduler.adapters.repository import Repository
from services.scheduler.domain.effects import Effect, ReplyTo, SendPrepare, SendStart, SendStop
from services.scheduler.domain.events import (
    AddModelsRequested,
    CommandAccepted,
    DemandReceived,
    Event,
    NodeStatusReceived,
    Recovered,
    StartRefused,
    StopRefused,
    Tick,
)
from services.scheduler.domain.policy import Policy
from services.scheduler.loop import SchedulerLoop
from shared.contracts.demand import Demand, DemandNoted
from shared.contracts.models import ModelSpec
from shared.contracts.node import InstanceState
from shared.tasks import end
from tests.support.fake_node import MIB, model_info
from tests.unit.scheduler.fake_agents import Agent

READY, LOADING = InstanceState.READY, InstanceState.LOADING
FIRST, THEN = ("a", "b"), ("c",)
"""Two models fit; the third evicts one of them."""


class Crashed(Exception):
    """The process ends here."""


@dataclass
class Steps:
    """Counts steps, and dies at number `die_at` (0: never)."""

    die_at: int = 0
    count: int = 0
    at: str = ""

    def __call__(self, what: str) -> None:
        self.count += 1
        if self.count == self.die_at:
            self.at = what
            raise Crashed(what)


class DyingRepository(Repository):
    def __init__(self, engine: AsyncEngine, steps: Steps) -> None:
        super().__init__(engine)
        self._steps = steps

    async def commit(self, epoch: int, changes: Iterable[Any]) -> None:
        self._steps("before the transaction")
        await super().commit(epoch, changes)
        self._steps("after the commit")


class Nodes(Outbox):
    """The port of effects: they arrive at once, in order.

    Attributes:
        undelivered: Effects that a dead leader has not sent.
    """

    def __init__(self, site: Site, steps: Steps) -> None:
        self._site, self._steps = site, steps
        self.loop: SchedulerLoop
        self.undelivered: list[Effect] = []

    def node_reported(self, node: str, boot_id: str) -> None:
        pass

    def carry_out(self, effects: Iterable[Effect], committed_at: float) -> None:
        self.undelivered = list(effects)
        while self.undelivered:
            self._steps(type(self.undelivered[0]).__name__)
            for answer in self._site.deliver(self.undelivered.pop(0)):
                self.loop.post(answer)


@dataclass
class Site:
    """State that outlives a leader: the database, the nodes, the clients' requests."""

    url: str
    engine: AsyncEngine
    steps: Steps
    agents: dict[str, Agent]
    now: float = 1000.0
    registered: bool = False
    promised: set[str] = field(default_factory=set)
    """Plans announced to gateways."""
    refused: list[str] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)

    def deliver(self, effect: Effect) -> list[Event]:
        """Deliver effects; return the resulting events."""
        match effect:
            case SendStart(node=node, command=command):
                error = self.agents[node].start(command, self.now)
                if error is not None:
                    self.refused.append(error.code)
                    return [StartRefused(self.now, command.instance_id, error)]
                return [CommandAccepted(self.now, command.instance_id)]
            case SendStop(node=node, command=command):
                error = self.agents[node].stop(effect)
                return [StopRefused(self.now, command.instance_id, error)] if error is not None else []
            case ReplyTo(answer=DemandNoted(plan_id=plan_id)) if plan_id is not None:
                self.promised.add(plan_id)
            case ReplyTo(waiter="models"):
                self.registered = True
            case SendPrepare():
                pass
        return []

    def of(self, model: str, *states: InstanceState) -> list[str]:
        return [
            instance_id
            for agent in self.agents.values()
            for instance_id, r in agent.instances.items()
            if r.command.card.name == model and (r.state in states if states else r.state.holds_memory)
        ]


async def lead(site: Site, *, rounds: int) -> Nodes:
    """Lead for one term.

    Nodes report, clients repeat their requests, and pending work continues.

    Raises:
        Crashed: The leader died.
    """
    async with leadership(plain_url(site.url)) as term:
        site.epochs.append(term.epoch)
        repository = DyingRepository(site.engine, site.steps)
        nodes = Nodes(site, site.steps)
        nodes.loop = loop = SchedulerLoop(await repository.load(term.epoch, site.now), repository, LoadTraces(), Policy())
        running = asyncio.create_task(loop.run(nodes))
        try:
            await settled(loop, running, Recovered(site.now))
            for number in range(rounds):
                await one_round(site, loop, running, THEN if number >= rounds // 2 else FIRST)
            return nodes
        finally:
            await end(running)


async def settled(loop: SchedulerLoop, running: asyncio.Task[None], *events: Event) -> None:
    """Decide one event after the other, with all that follow."""
    for one in events:
        loop.post(one)
        idle = asyncio.create_task(loop.wait_until_idle())
        try:
            await asyncio.wait((idle, running), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            await end(idle)


async def one_round(site: Site, loop: SchedulerLoop, running: asyncio.Task[None], wanted: tuple[str, ...]) -> None:
    """Pass 0.5 s: nodes report, engines start and stop, gateways repeat demand."""

    def report() -> list[Event]:
        return [NodeStatusReceived(site.now, agent.status(site.now)) for agent in site.agents.values()]

    site.now += 0.5
    await settled(loop, running, *report())
    if not site.registered:
        specs = tuple(ModelSpec(name=n, source=f"/m/{n}", keep_alive=-1) for n in (*FIRST, *THEN))
        infos = {s.name: model_info(s.source, 100 * MIB) for s in specs}
        await settled(loop, running, AddModelsRequested(site.now, "models", specs, infos, False))
    for model in (*FIRST, *THEN):
        waiting = int(model in wanted and not site.of(model, READY))
        await settled(loop, running, DemandReceived(site.now, Demand(gateway="g", model=model, waiting=waiting), f"{model} waits"))
    for agent in site.agents.values():
        agent.finish_stops()
        for r in agent.instances.values():
            if r.state is LOADING:
                r.state, r.idle_since, r.completed = READY, site.now - 60, 1
    await settled(loop, running, *report(), Tick(site.now))


@contextlib.asynccontextmanager
async def counted(engine: AsyncEngine, steps: Steps) -> AsyncIterator[None]:
    """Count the leader's statements, and the moments before its commits, as steps."""

    def statement(_connection: Any, _cursor: Any, sql: str, *_: Any) -> None:
        if sql.startswith(("INSERT", "UPDATE", "DELETE")):
            steps(sql[:40])

    def commit(_connection: Any) -> None:
        steps("before COMMIT")

    hooks: list[tuple[str, Callable[..., None]]] = [("before_cursor_execute", statement), ("commit", commit)]
    for name, hook in hooks:
        event.listen(engine.sync_engine, name, hook)
    try:
        yield
    finally:
        for name, hook in hooks:
            event.remove(engine.sync_engine, name, hook)


async def new_site(url: str, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, die_at: int) -> Site:
    """Create an empty database, and one node with room for two."""
    async with engine.begin() as connection:
        await connection.execute(text("TRUNCATE models, nodes, devices, instances, plans, parameters, residency, links"))
    site = Site(url, engine, Steps(die_at), {"n1": Agent("n1", 700 * MIB)})
    monkeypatch.setattr(clock, "now", lambda: site.now)
    return site
