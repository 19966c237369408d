"""Late binding under a real nodeagent, loader and executors, on three separate devices."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.inference import InferFinished
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, InstanceStatus
from tests.integration.engine.processes import SLOW, until_streaming
from tests.integration.nodeagent.harness import Node, gone
from tests.integration.nodeagent.real_engines import start_of
from tests.integration.nodeagent.shared_engines import ASKED, shared_node
from tests.support.engines import Engines
from tests.support.servers import NatsServer

pytestmark = pytest.mark.slow
DEVICES = ("cpu:0", "cpu:1", "cpu:2")


@pytest.fixture
async def node(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[tuple[Node, list[ModelCard], Engines]]:
    """Yield a node with three separate devices, the cards of two shared models, and a client."""
    devices = ",".join(f"{d}=1GiB/separate" for d in DEVICES)
    async with shared_node(nats_server.url, tmp_path, THAW_DEVICES=devices) as (node, cards):
        yield node, cards, Engines(node.mesh, node.name, nats_server.url, tmp_path)


async def send(node: Node, card: ModelCard, instance_id: str, planned: str, *grant: str) -> None:
    command = start_of(card, instance_id).model_copy(update={"device_ids": (planned,), "grant": grant})
    await node.mesh.request(subjects.node_command(node.name), command, Done)


async def started(node: Node, card: ModelCard, instance_id: str, planned: str, *grant: str) -> InstanceStatus:
    await send(node, card, instance_id, planned, *grant)
    status = await node.reaches(instance_id, InstanceState.READY, InstanceState.FAILED, within=90)
    assert status.error is None
    return status


async def test_an_attach_is_bound_to_the_device_that_can_run_it(node: tuple[Node, list[ModelCard], Engines]) -> None:
    agent, cards, engines = node
    first = await started(agent, cards[0], "first", "cpu:0")
    assert (first.device_ids, first.bound_by) == (("cpu:0",), "")
    running = await engines.ask("first", "completion", **SLOW)
    await until_streaming(running)
    await agent.until(lambda s: any(i.instance_id == "first" and i.load.active + i.load.completed for i in s.instances))
    second = await started(agent, cards[1], "second", "cpu:0", "cpu:1")
    if not await _has_ended(agent, "first"):
        assert second.device_ids == ("cpu:1",), "cpu:0 computes for another model"
        assert second.pids != first.pids
    assert second.bound_by
    assert isinstance(await running.last(), InferFinished)
    expected = (await engines.answer("second", "completion", **ASKED)).tokens()

    there = second.device_ids[0]
    await agent.stop("second")
    await agent.reaches("second", InstanceState.STOPPED)
    again = await started(agent, cards[1], "again", "cpu:2", "cpu:0", "cpu:1")
    assert (again.device_ids, again.bound_by) == ((there,), "resident"), "its weights are still there"
    assert again.pids == second.pids
    assert (await engines.answer("again", "completion", **ASKED)).tokens() == expected
    reserved = {d.device_id: d.reserved_bytes for d in agent.latest.devices}
    assert reserved[there] > 0
    assert reserved["cpu:2"] == 0, "the planned device was not booked"


async def _has_ended(agent: Node, instance_id: str) -> bool:
    return agent.instance(instance_id).load.completed > 0


async def stopped_executor(agent: Node, card: ModelCard) -> psutil.Process:
    """Return the executor of cpu:1, which does not react until it is continued or killed."""
    status = await started(agent, card, "idle", "cpu:1")
    executor = psutil.Process(status.pids[0])
    executor.send_signal(signal.SIGSTOP)
    return executor


@pytest.mark.usefixtures("kernel_kills")
async def test_an_executor_that_dies_before_the_attach(node: tuple[Node, list[ModelCard], Engines]) -> None:
    """The memory that the start booked is free afterwards, and the next start runs."""
    agent, cards, engines = node
    executor = await stopped_executor(agent, cards[0])
    await send(agent, cards[1], "bound", "cpu:1", "cpu:2")
    bound = await agent.reaches("bound", InstanceState.PREPARING, InstanceState.LOADING)
    assert (bound.device_ids, bound.bound_by) == (("cpu:1",), "quiet")
    executor.kill()
    await agent.reaches("idle", InstanceState.FAILED)
    ended = await agent.reaches("bound", InstanceState.FAILED, InstanceState.READY, within=90)
    assert ended.device_ids == ("cpu:1",)
    next_id = "bound"
    if ended.state is InstanceState.FAILED:
        await agent.until(lambda s: s.devices[1].reserved_bytes == 0)
        next_id = "next"
        await started(agent, cards[1], next_id, "cpu:0", "cpu:1")
    assert isinstance((await engines.answer(next_id, "completion", **ASKED)).replies[-1], InferFinished)


async def test_an_agent_that_dies_between_the_binding_and_the_attach(node: tuple[Node, list[ModelCard], Engines]) -> None:
    """The next agent has the binding from the record. No memory is booked twice, none is lost."""
    agent, cards, engines = node
    executor = await stopped_executor(agent, cards[0])
    await send(agent, cards[1], "bound", "cpu:1", "cpu:2")
    bound = await agent.reaches("bound", InstanceState.PREPARING, InstanceState.LOADING)
    assert bound.device_ids == ("cpu:1",)
    agent.kill_agent()
    executor.send_signal(signal.SIGCONT)
    await agent.start_agent()
    found = await agent.reaches("bound", InstanceState.FAILED, InstanceState.READY, within=90)
    assert found.device_ids == ("cpu:1",)
    assert agent.latest.devices[2].reserved_bytes == 0, "the other granted device is not booked"
    idle = await agent.reaches("idle", InstanceState.READY)
    assert idle.pids == (executor.pid,)
    following = await started(agent, cards[1], "next", "cpu:0", "cpu:1")
    assert following.device_ids in (("cpu:0",), ("cpu:1",))
    for instance_id in ("idle", "next"):
        assert isinstance((await engines.answer(instance_id, "completion", **ASKED)).replies[-1], InferFinished)
    assert not await gone(executor.pid, within=0)
