"""The loop's handling of events and deadlines."""

from __future__ import annotations

import asyncio
import itertools
import time
from types import SimpleNamespace

import pytest

from services.nodeagent import loop as loop_module
from services.nodeagent.domain import events as e
from services.nodeagent.domain.state import Policy
from services.nodeagent.loop import PAUSED_S, Loop
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


async def test_reports_of_a_pause_are_handled_before_engines_count_as_silent() -> None:
    """The agent did not run for a while; the reports of its engines wait in its connection."""
    world = World(policy=Policy(adopt_s=1.0))
    engines = ("a", "b", "c")
    adopted = [world.ready(name, pid, reserve=20) for pid, name in enumerate(engines, 7)]
    performed: list[e.Effect] = []
    loop = Loop(World(policy=Policy(adopt_s=1.0)).state, performed.append)
    deciding = asyncio.create_task(loop.run())
    for instance in adopted:
        loop.post(e.Adopted(instance, alive=True, error=ERROR))
    await loop.wait_until_idle()
    time.sleep(1.0 + PAUSED_S + 0.1)  # noqa: ASYNC251 - the process does not run
    for _ in range(20):  # what is due runs, and the connection is read
        await asyncio.sleep(0)
    for pid, name in enumerate(engines, 7):
        loop.post(e.EngineReported(report(name, pid=pid)))
    await loop.wait_until_idle()
    await asyncio.sleep(0.05)
    deciding.cancel()
    assert {name: i.state for name, i in loop.state.instances.items()} == dict.fromkeys(engines, InstanceState.READY)
    assert not [effect for effect in performed if isinstance(effect, e.Signal)]


@pytest.mark.parametrize("has_events", [False, True], ids=["no events", "an event in each wait"])
async def test_deadline_is_put_off_once_if_every_wait_is_late(monkeypatch: pytest.MonkeyPatch, has_events: bool) -> None:
    """The agent is starved of CPU time: each wait ends more than a second late."""
    world = World()
    ended = world.ready("gone").model_copy(update={"state": InstanceState.STOPPED, "ended_at": -1000.0})
    world.state = type(world.state)(world.state.ledger, instances={"gone": ended})
    seconds = itertools.count(step=2.0 * PAUSED_S)
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    performed: list[e.Effect] = []

    def perform(effect: e.Effect) -> None:
        performed.append(effect)
        if has_events:  # while the loop waits
            asyncio.get_running_loop().call_soon(loop.post, e.EngineReported(report("unknown")))

    loop = Loop(world.state, perform)
    running = asyncio.create_task(loop.run())
    if has_events:
        asyncio.get_running_loop().call_soon(loop.post, e.EngineReported(report("unknown")))
    assert await loop.wait_until(lambda state: "gone" not in state.instances, 5.0)
    running.cancel()
    assert e.Forget("gone") in performed[:5]


async def test_deadline_is_not_put_off_if_the_waits_before_it_were_late_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent is starved of CPU time, and each wait ends late, with an event."""
    due, world = 1000.0, World()
    ended = world.ready("gone").model_copy(
        update={"state": InstanceState.STOPPED, "ended_at": due - world.state.policy.keep_stopped_s}
    )
    world.state = type(world.state)(world.state.ledger, instances={"gone": ended})
    clock = itertools.count(step=100)
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    late: list[e.Effect] = []

    def perform(effect: e.Effect) -> None:
        if next(clock) > due:
            late.append(effect)
        if not isinstance(effect, e.Forget):
            asyncio.get_running_loop().call_soon(loop.post, e.EngineReported(report("unknown")))

    loop = Loop(world.state, perform)
    running = asyncio.create_task(loop.run())
    asyncio.get_running_loop().call_soon(loop.post, e.EngineReported(report("unknown")))
    assert await loop.wait_until(lambda state: "gone" not in state.instances, 5.0)
    running.cancel()
    assert late.index(e.Forget("gone")) <= 1, "the event of the wait, and then the deadline"
