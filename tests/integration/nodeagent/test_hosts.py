"""Hosted engines under a real nodeagent.

The engine, its host and the agent die in every order.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from shared.contracts.node import InstanceState
from shared.processes import find_marked, mark_of
from shared.settings import NodeSettings
from tests.integration.nodeagent.harness import WITHIN_S, Node, gone, running_node, start_command
from tests.support.hosted import FAKE, MIB, fake_card, hosted_card, reapers, token_of
from tests.support.servers import NatsServer

READY, FAILED, STOPPED = InstanceState.READY, InstanceState.FAILED, InstanceState.STOPPED
SLOW_S = 2 * WITHIN_S


@pytest.fixture
async def node(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Node]:
    async with running_node(nats_server.url, tmp_path) as node:
        yield node


async def left(node: Node, instance_id: str) -> set[int]:
    return await asyncio.to_thread(find_marked, mark_of(NodeSettings(home=node.home, node=node.name).scope, instance_id))


async def ready(node: Node, instance_id: str, *options: str) -> tuple[int, ...]:
    """Wait until ready; return the host's pid, then the engine's."""
    await start_command(node, instance_id, fake_card(*options))
    status = await node.reaches(instance_id, READY, FAILED, within=SLOW_S)
    assert status.error is None
    return status.pids


async def test_from_start_to_proved_free(node: Node) -> None:
    host, *engine = await ready(node, "h1", "--fork")
    assert set(engine) == await left(node, "h1")
    measured = await node.until(lambda s: s.instances[0].memory.private > 20 * MIB)
    await node.stop("h1", token=(1 << 32) + 2)
    status = await node.reaches("h1", STOPPED, FAILED, within=SLOW_S)
    assert status.error is None
    assert status.freed_bytes
    assert measured.instances[0].memory.private > 20 * MIB
    assert await left(node, "h1") == set()
    assert await gone(host)


async def test_death_of_a_host_ends_its_engine_and_all_its_forks(node: Node) -> None:
    host, *engine = await ready(node, "h2", "--fork", "--ignore-term")
    assert len(engine) == 2
    os.kill(host, signal.SIGKILL)
    status = await node.reaches("h2", FAILED, within=SLOW_S)
    assert status.error is not None
    await node.until(lambda s: s.devices[0].reserved_bytes == 0, within=SLOW_S)
    assert await left(node, "h2") == set()


async def test_death_of_the_nodeagent_does_not_affect_host_and_engine(node: Node) -> None:
    pids = await ready(node, "h3")
    node.kill_agent()
    await node.start_agent()
    assert node.instance("h3").state is READY, node.instance("h3").error
    assert node.instance("h3").pids == pids
    assert all(psutil.pid_exists(pid) for pid in pids)


async def test_next_nodeagent_cleans_up_after_a_host_that_died(node: Node) -> None:
    host, engine, *_ = await ready(node, "h4", "--fork")
    node.kill_agent()
    for pid in reapers(token_of(engine)):  # which would leave the next agent nothing to do
        os.kill(pid, signal.SIGKILL)
        assert await gone(pid)
    os.kill(host, signal.SIGKILL)
    assert await gone(host)
    assert len(await left(node, "h4")) >= 1
    await node.start_agent()
    await node.reaches("h4", FAILED)
    await node.until(lambda s: s.devices[0].reserved_bytes == 0, within=SLOW_S)
    assert await left(node, "h4") == set()


async def test_loader_releases_weights_that_an_engine_has_copied(node: Node) -> None:
    """The loader releases weights that an engine has copied.

    A page that two processes map is not paged out: the engine must have its weights to itself
    before it can be suspended.
    """
    await start_command(
        node, "h5", hosted_card("engine://m", "vllm", command=FAKE, memory=MIB, engine_args={"load_format": "thaw"})
    )
    assert (await node.reaches("h5", READY, FAILED, within=SLOW_S)).error is None
    await node.until(lambda _: "h5" in node.released, within=SLOW_S)
