"""Spare hosts: an interpreter with its imports done becomes the engine.

It ends with its owner.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.enginehost.spare_node import WITHIN_S, Node
from tests.integration.nodeagent.harness import gone
from tests.support.hosted import Hosts


@pytest.fixture
async def node(hosts: Hosts, tmp_path: Path) -> Any:
    node = Node(hosts, tmp_path)
    yield node
    await node.close()


async def test_an_interpreter_in_waiting_becomes_the_engine(node: Node) -> None:
    waiting = await node.waits()
    start = node.start()
    pid = await node.ready(start)
    assert ("__main__", waiting) in node.imported(), "the very process"
    # The next spare may import by now, too.
    lines = [line.split(maxsplit=1) for line in Path(f"{node.imports}-collected").read_text().splitlines()]
    collected = [text for pid_, text in lines if int(pid_) == waiting]
    assert collected == ["vllm.entrypoints.openai.api_server False", "__main__ True"], "no garbage collection while it imports"
    assert psutil.Process(waiting).ppid() == pid
    answer = await node.hosts.request(start.instance_id, "chat", messages=[], max_tokens=3)
    assert answer.status == 200
    assert "environment 1" in Path(start.log_path).read_text(), "its words are the instance's, its environment the engine's"
    os.kill(pid, signal.SIGTERM)
    assert await gone(waiting)
    assert await node.launcher.exit_status(pid, WITHIN_S) == 0


async def test_next_spare_is_started_when_the_node_is_quiet(node: Node) -> None:
    first = await node.waits()
    pid = await node.ready(node.start())
    second = await node.waits(2)
    assert second != first
    other = await node.ready(node.start())
    assert ("__main__", second) in node.imported()
    for host in (pid, other):
        os.kill(host, signal.SIGTERM)
        await node.launcher.exit_status(host, WITHIN_S)


@pytest.mark.parametrize("more", [{"env": {"VLLM_LOGGING_LEVEL": "DEBUG"}}, {"command": ["sleep", "60"], "ready_timeout": 1}])
async def test_model_with_its_own_environment_or_command_uses_no_spare(node: Node, more: dict[str, Any]) -> None:
    waiting = await node.waits()
    start = node.start(**more)
    pid = await node.launcher.launch(start)
    await node.hosts.settled(start.instance_id)
    assert ("__main__", waiting) not in node.imported()
    assert psutil.pid_exists(waiting), "and it waits on"
    os.kill(pid, signal.SIGTERM)
    await node.launcher.exit_status(pid, WITHIN_S)


async def test_dead_spare_is_replaced(node: Node) -> None:
    waiting = await node.waits()
    os.kill(waiting, signal.SIGKILL)
    again = await node.waits(2)
    assert again != waiting
    pid = await node.ready(node.start())
    os.kill(pid, signal.SIGTERM)
    await node.launcher.exit_status(pid, WITHIN_S)


async def test_spare_ends_with_its_killed_host(node: Node) -> None:
    waiting = await node.waits()
    host = psutil.Process(waiting).ppid()
    os.kill(host, signal.SIGKILL)
    assert await gone(waiting)


async def test_engine_from_a_spare_ends_with_its_host(node: Node) -> None:
    waiting = await node.waits()
    pid = await node.ready(node.start())
    os.kill(pid, signal.SIGKILL)
    assert await gone(waiting)
    assert await node.launcher.exit_status(pid, WITHIN_S) == -signal.SIGKILL


async def test_an_unneeded_spare_exits(node: Node) -> None:
    waiting = await node.waits()
    await node.close()
    assert await gone(waiting)


def test_engines_without_spares_are_reported() -> None:
    reported = subprocess.run(
        [sys.executable, "-m", "services.enginehost", "--spare", "ollama"], capture_output=True, text=True, check=False
    )
    assert reported.returncode == 2
    assert "engine ollama does not support spare interpreters" in reported.stderr
