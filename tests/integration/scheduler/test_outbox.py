"""The outbox over real NATS: a nodeagent that is replaced, and starts that were given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
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
    def __init__(self, mesh: Mesh) -> None:
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
            PATIENCE_S,
            cast("Migrations", None),
            self._is_wanted,
            self.forgotten.append,
        )

    def _is_wanted(self, command: StartInstance | ResumeInstance) -> bool:
        return command.instance_id not in self.given_up


@pytest.fixture
async def setup(own_nats: NatsServer, migrated_url: str) -> AsyncIterator[Setup]:
    settings = SchedulerSettings(nats_url=SecretStr(own_nats.url), database_url=SecretStr(migrated_url))
    mesh = Mesh(settings, "test")
    await mesh.start()
    setup = Setup(mesh)
    yield setup
    await setup.outbox.close()
    await mesh.stop()


def starts(*models: str) -> list[SendStart]:
    """Return starts on n1, as the scheduler decides them; each waits two minutes for its answer."""
    w = World()
    w.node()
    for name in models:
        w.model(name, 1)
        w.demand(name)
    sent = w.sent(SendStart)
    assert len(sent) == len(models)
    limit = {"deadline_ms": int(PATIENCE_S * 1e3)}
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
