"""The tests' own fork server: what a forked nodeagent starts is forked too."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from shared.contracts.node import InstanceState
from tests.integration.nodeagent.harness import Node, gone, running_node
from tests.support.servers import NatsServer
from thaw.launcher.forkserver.cloning import supports_cloning

pytestmark = pytest.mark.skipif(not supports_cloning(), reason="only some Linux systems fork siblings")


def helper_of(node: Node) -> psutil.Process:
    """Return the fork server of the nodeagent."""
    (found,) = [p for p in agent_of(node).children() if p.cmdline()[0].startswith("tests' fork server")]
    return found


def agent_of(node: Node) -> psutil.Process:
    assert node.process is not None
    return psutil.Process(node.process.pid)


async def test_engine_is_a_child_of_the_nodeagent_with_the_environment_that_it_gave(node: Node) -> None:
    instance = await node.start()
    (pid,) = (await node.reaches(instance, InstanceState.READY)).pids
    engine = psutil.Process(pid)
    assert engine.parent() == agent_of(node)
    assert "tests.support.stub_engine" in engine.cmdline()
    assert engine.environ()["THAW_NODE"] == node.name


async def test_server_is_not_taken_for_the_nodeagent_and_ends_with_it(node: Node) -> None:
    helper = helper_of(node)
    assert "THAW_NODE" not in helper.environ()
    node.kill_agent()
    assert await gone(helper.pid)


async def test_nodeagent_without_its_server_executes_engines(nats_server: NatsServer, tmp_path: Path) -> None:
    async with running_node(nats_server.url, tmp_path) as node:
        helper_of(node).kill()
        instance = await node.start()
        (pid,) = (await node.reaches(instance, InstanceState.READY)).pids
        assert psutil.Process(pid).parent() == agent_of(node)
