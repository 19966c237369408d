"""A node whose engines support only their own sleep.

Real processes, a server with Ollama's endpoints, and memory read back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.contracts.node import InstanceState, InstanceStatus
from tests.integration.nodeagent.harness import Node, running_node, start_command
from tests.support.hosted import MIB, fake_program, hosted_card
from tests.support.servers import NatsServer

READY, ASLEEP, STOPPED, FAILED = InstanceState.READY, InstanceState.ASLEEP, InstanceState.STOPPED, InstanceState.FAILED
BALLAST_MIB = 200
READY_WITHIN_S = 120.0


@pytest.fixture
async def node(nats_server: NatsServer, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    options = getattr(request, "param", ())
    program = fake_program(tmp_path, "ollama", "--ready-after", "1.5", "--ballast", str(BALLAST_MIB), *options)
    async with running_node(nats_server.url, tmp_path, THAW_SUSPEND="sleep", THAW_OLLAMA_PROGRAM=program) as found:
        yield found


async def ready(node: Node) -> InstanceStatus:
    await start_command(node, "s1", hosted_card("engine://qwen3:0.6b", "ollama", memory=600 * MIB))
    await node.reaches("s1", READY, FAILED, within=READY_WITHIN_S)
    await node.until(lambda s: any(i.suspension.possible for i in s.instances))
    return node.instance("s1")


@pytest.mark.parametrize("node", [("--ready-after", "15")], indirect=True)
async def test_sleeping_engine_resumes_with_a_new_model_process(node: Node) -> None:
    """An engine sleeps, and resumes with a new process for its model.

    Ollama's server stays, and ends and starts a process for the model: the new one holds its bytes.
    It starts slower than it resumes, also if some processes are paused: else it is not suspended
    again.
    """
    before = await ready(node)
    assert before.suspension.way == "sleep"
    await node.suspend("s1")
    asleep = await node.reaches("s1", ASLEEP, STOPPED, FAILED)
    assert asleep.state is ASLEEP, asleep.error
    assert asleep.suspension.freed_bytes > 0.9 * BALLAST_MIB * MIB
    assert asleep.memory.reserved < before.memory.reserved - 0.9 * BALLAST_MIB * MIB
    await node.resume("s1")
    again = await node.reaches("s1", READY, FAILED)
    assert (again.pids[:2], again.suspension.fell_back) == (before.pids[:2], None)
    await node.until(lambda s: len(s.instances[0].pids) == len(before.pids) and s.instances[0].pids != before.pids)
    await node.until(lambda s: s.instances[0].suspension.possible)


@pytest.mark.parametrize("node", [("--hoard",)], indirect=True)
async def test_sleep_that_freed_nothing_is_reported_and_the_engine_stopped(node: Node) -> None:
    await ready(node)
    await node.suspend("s1")
    status = await node.reaches("s1", ASLEEP, STOPPED, FAILED)
    assert status.state is STOPPED
    assert "reports that it sleeps" in status.suspension.reason
    await node.until(lambda s: s.devices[0].reserved_bytes == 0)


@pytest.mark.parametrize("node", [("--no-reload",)], indirect=True)
async def test_different_output_after_a_sleep_causes_one_cold_start(node: Node) -> None:
    before = await ready(node)
    await node.suspend("s1")
    await node.reaches("s1", ASLEEP)
    await node.resume("s1")
    again = await node.reaches("s1", READY, FAILED, within=READY_WITHIN_S)
    assert again.state is READY, again.error
    assert set(again.pids).isdisjoint(before.pids)
    assert again.suspension.fell_back is not None
    assert "differs from its output before" in again.suspension.fell_back.message
