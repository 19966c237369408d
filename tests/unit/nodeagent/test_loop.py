"""The loop's handling of events and deadlines."""

from __future__ import annotations

import asyncio
import time

from services.nodeagent.domain import events as e
from services.nodeagent.loop import Loop
from shared.contracts.node import InstanceState
from tests.unit.nodeagent.world import ERROR, World, report


async def test_constant_flow_of_events_does_not_delay_deadlines() -> None:
    """A constant flow of events does not delay deadlines.

    Engines report without pause; an instance that ended long ago is still forgotten at once.
    """
    world = World()
    ended = world.ready("gone").model_copy(update={"state": InstanceState.STOPPED, "ended_at": time.monotonic() - 1000})
    world.state = type(world.state)(world.state.ledger, instances={"gone": ended})
    has_reported: list[e.Effect] = []

    def perform(effect: e.Effect) -> None:
        has_reported.append(effect)
        if len(has_reported) < 100:
            loop.post(e.EngineReported(report("unknown")))

    loop = Loop(world.state, perform)
    loop.post(e.EngineReported(report("unknown")))
    running = asyncio.create_task(loop.run())
    assert await loop.wait_until(lambda _: len(has_reported) >= 100, 5.0)
    running.cancel()
    assert e.Forget("gone") in has_reported[:10]
    assert "gone" not in loop.state.instances


async def test_adoption_is_over_though_ended_instances_are_forgotten_meanwhile() -> None:
    """Records may be of instances that ended longer ago than they are shown."""
    running = World().ready("running")
    ended = World().ready("ended").model_copy(update={"state": InstanceState.STOPPED, "ended_at": time.monotonic() - 1000})
    loop = Loop(World().state, lambda _: None)
    for instance in (ended, running):
        loop.post(e.Adopted(instance, alive=True, error=ERROR))
    deciding = asyncio.create_task(loop.run())
    await loop.wait_until_idle()
    deciding.cancel()
    assert set(loop.state.instances) == {"running"}
