"""The outbox over real NATS: a nodeagent that is replaced, and starts that were given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from nats.js import JetStreamContext
from pydantic import SecretStr

from services.scheduler.adapters import clock
from services.scheduler.adapters.catalog import Catalog
from services.scheduler.adapters.load_traces import LoadTraces
from services.scheduler.adapters.migrations import Migrations
from services.scheduler.adapters.outbox import Outbox
from services.scheduler.domain.effects import SendStart
from services.scheduler.domain.events import CommandAccepted, Event, StartRefused
from services.scheduler.settings import SchedulerSettings
from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.node import NODE_COMMAND, NodeCommand, ResumeInstance, StartInstance
from shared.messaging import Mesh, Responder
from tests.support.servers import NatsServer
from tests.unit.scheduler.world import World

PATIENCE_S = 120.0
"""Longer than the time limit of the test: an answer cannot follow from it."""

IMPATIENCE_S = 3.0


class Agents:
    """The nodeagents of n1, one at a time, on real NATS."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._responder: Responder | None = None
        self.received: asyncio.Queue[str] = asyncio.Queue()

    async def replace(self, *, answers: bool) -> None:
        """End the nodeagent and start another; without `answers` it dies during each command."""
        if self._responder is not None:
            await self._responder.stop()

        async def on_command(command: NodeCommand) -> Message:
            self.received.put_nowait(command.instance_id)
            if not answers:
                await asyncio.Event().wait()
            return Done()

        self._responder = self._mesh.respond(subjects.node_command("n1"), NODE_COMMAND, on_command, concurrent=True)
        await self._responder.start()
        await self._mesh.flush()


class Setup:
    def __init__(self, mesh: Mesh, patience_s: float) -> None:
        self.mesh = mesh
        self.agents = Agents(mesh)
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.given_up: set[str] = set()
        self.forgotten: list[str] = []
        self.outbox = Outbox(
            mesh,
            cast("JetStreamContext", None),
            cast("Catalog", None),
            LoadTraces(),
            self.events.put_nowait,
            lambda reply: None,
            patience_s,
            cast("Migrations", None),
            self._is_wanted,
            self.forgotten.append,
        )

    def _is_wanted(self, command: StartInstance | ResumeInstance) -> bool:
        return command.instance_id not in self.given_up


@asynccontextmanager
async def set_up(nats: NatsServer, database_url: str, patience_s: float) -> AsyncIterator[Setup]:
    settings = SchedulerSettings(nats_url=SecretStr(nats.url), database_url=SecretStr(database_url))
    mesh = Mesh(settings, "test")
    await mesh.start()
    setup = Setup(mesh, patience_s)
    yield setup
    await setup.outbox.close()
    await mesh.stop()


@pytest.fixture
async def setup(own_nats: NatsServer, migrated_url: str) -> AsyncIterator[Setup]:
    async with set_up(own_nats, migrated_url, PATIENCE_S) as setup:
        yield setup


@pytest.fixture
async def impatient(own_nats: NatsServer, migrated_url: str) -> AsyncIterator[Setup]:
    """Set up an outbox whose patience is over soon."""
    async with set_up(own_nats, migrated_url, IMPATIENCE_S) as setup:
        yield setup


def starts(*models: str, limit_s: float = PATIENCE_S) -> list[SendStart]:
    """Return starts on n1, as the scheduler decides them; each waits `limit_s` for its answer."""
    w = World()
    w.node()
    for name in models:
        w.model(name, 1)
        w.demand(name)
    sent = w.sent(SendStart)
    assert len(sent) == len(models)
    limit = {"deadline_ms": int(limit_s * 1e3)}
    return [SendStart(e.node, e.command.model_copy(update=limit), e.requested_at, e.planned_at) for e in sent]


async def test_a_command_to_a_replaced_nodeagent_is_sent_to_the_next_one_at_once(setup: Setup) -> None:
    first, second = starts("a", "b")
    await setup.agents.replace(answers=False)
    setup.outbox.node_reported("n1", "boot-1")
    setup.outbox.carry_out([first, second], clock.now())
    assert await setup.agents.received.get() == first.command.instance_id
    setup.outbox.node_reported("n1", "boot-1")
    await setup.agents.replace(answers=True)
    assert setup.events.empty()
    setup.outbox.node_reported("n1", "boot-2")
    for start in (first, second):
        event = await setup.events.get()
        assert isinstance(event, CommandAccepted)
        assert event.instance_id == start.command.instance_id
        assert await setup.agents.received.get() == start.command.instance_id
    assert setup.agents.received.empty()


async def test_a_start_that_is_given_up_while_it_waits_is_not_sent(setup: Setup) -> None:
    first, second, third = starts("a", "b", "c")
    await setup.agents.replace(answers=False)
    setup.outbox.node_reported("n1", "boot-1")
    setup.outbox.carry_out([first, second, third], clock.now())
    assert await setup.agents.received.get() == first.command.instance_id
    setup.given_up = {first.command.instance_id, second.command.instance_id}
    await setup.agents.replace(answers=True)
    setup.outbox.node_reported("n1", "boot-2")
    refused = await setup.events.get()
    assert isinstance(refused, StartRefused), "it had been sent: whether it arrived is unknown"
    assert refused.instance_id == first.command.instance_id
    assert await setup.agents.received.get() == third.command.instance_id
    accepted = await setup.events.get()
    assert isinstance(accepted, CommandAccepted)
    assert accepted.instance_id == third.command.instance_id


async def test_a_start_waits_for_the_connection_to_nats_however_long_that_takes(impatient: Setup, own_nats: NatsServer) -> None:
    [start] = starts("a", limit_s=IMPATIENCE_S)
    await impatient.agents.replace(answers=True)
    own_nats.kill()
    while impatient.mesh.is_connected:  # noqa: ASYNC110 - the client reports it to the mesh only
        await asyncio.sleep(0.01)
    impatient.outbox.carry_out([start], clock.now())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(impatient.events.get(), 2 * IMPATIENCE_S)
    own_nats.restart()
    assert isinstance(await impatient.events.get(), CommandAccepted)


async def test_a_start_on_a_node_without_a_nodeagent_fails_after_the_patience(impatient: Setup) -> None:
    [start] = starts("a", limit_s=IMPATIENCE_S)
    impatient.outbox.carry_out([start], clock.now())
    assert isinstance(await impatient.events.get(), StartRefused)
