"""Engines that are interpreters of their own, on a machine without room for more processes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.nodeagent.engines.direct import DirectLauncher
from shared.contracts.engine import EngineStart
from shared.contracts.executor import ExecutorStart
from shared.errors import EngineFailed
from tests.support.fake_engine import card_of


async def test_a_clean_up_that_cannot_start_a_process_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent repeats it after a `ThawError`, and ends after any other error."""

    async def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    card = card_of("a", engine="vllm", container={"image": "vllm:1"})
    with pytest.raises(EngineFailed, match="Resource temporarily unavailable"):
        await DirectLauncher("services.enginehost", tmp_path / "specs").clean_up("i", card)


async def test_order_of_an_ended_start_is_removed(tmp_path: Path) -> None:
    """It has credentials, and a node starts engines for months."""
    specs = tmp_path / "specs"
    launcher = DirectLauncher("json.tool", specs)
    card = card_of("a", engine="vllm")
    order = EngineStart(instance_id="i", node="n", card=card, device="cpu:0", kv_bytes=0, log_path=str(tmp_path / "log"))
    pid = await launcher.launch(order)
    assert await launcher.exit_status(pid, 60) == 0
    assert [path.name for path in specs.iterdir()] == ["i.json"]
    await launcher.clean_up("i", card)
    assert not list(specs.iterdir())


@pytest.mark.parametrize("module", ["services.engine", "services.enginehost"])
async def test_a_process_removes_its_order_once_it_has_read_it(tmp_path: Path, module: str) -> None:
    """The agent may not live to see the process's end, and removes no order of an executor."""
    specs, log = tmp_path / "specs", str(tmp_path / "log")
    environment = {"THAW_NATS_URL": "nats://127.0.0.1:1", "THAW_HOME": str(tmp_path)}
    order: EngineStart | ExecutorStart
    if module == "services.engine":
        current = str(tmp_path / "current")
        order = ExecutorStart(
            executor_id="x", node="n", device="cpu:0", log_path=log, current_path=current, environment=environment
        )
    else:
        card = card_of("a", engine="vllm")
        order = EngineStart(instance_id="x", node="n", card=card, device="cpu:0", kv_bytes=0, log_path=log, environment=environment)
    launcher = DirectLauncher(module, specs)
    pid = await launcher.launch(order)
    try:
        async with asyncio.timeout(60):
            while list(specs.iterdir()):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        assert launcher._children[pid].poll() is None
    finally:
        os.kill(pid, signal.SIGKILL)
        await launcher.exit_status(pid, 60)


async def test_order_of_a_start_that_fails_is_removed(tmp_path: Path) -> None:
    specs, card = tmp_path / "specs", card_of("a", engine="vllm")
    order = EngineStart(instance_id="i", node="n", card=card, device="cpu:0", kv_bytes=0, log_path=str(tmp_path / "none" / "log"))
    with pytest.raises(EngineFailed, match="No such file"):
        await DirectLauncher("services.enginehost", specs).launch(order)
    assert not list(specs.iterdir())


def test_an_agent_removes_orders_whose_processes_have_ended(tmp_path: Path) -> None:
    """Those of the earlier agent; one of its processes may have to read its order yet."""
    specs = tmp_path / "specs"
    specs.mkdir()
    for name in ("ended.json", "starting.json"):
        (specs / name).write_text("{}")
    program = (sys.executable, "-c", "print(flush=True); input()", str(specs / "starting.json"))
    child = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()  # during an exec the kernel shows no command line
    try:
        DirectLauncher("services.enginehost", specs)
        assert [path.name for path in specs.iterdir()] == ["starting.json"]
    finally:
        child.kill()
        child.communicate()
    DirectLauncher("services.enginehost", specs)
    assert not list(specs.iterdir())


def start(program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)


async def test_each_instance_of_an_executor_gets_its_exit_status(tmp_path: Path) -> None:
    """The agent ends after an error that is not a `ThawError`."""
    launcher = DirectLauncher("services.engine", tmp_path / "specs")
    child = start("raise SystemExit(3)")
    launcher._children[child.pid] = child
    assert await asyncio.gather(*(launcher.exit_status(child.pid, 60) for _ in range(3))) == [3, 3, 3]
    assert await launcher.exit_status(child.pid, 60) is None
    assert child.stdin is not None
    child.stdin.close()


async def test_exit_status_of_a_process_that_has_not_ended_is_unknown(tmp_path: Path) -> None:
    launcher = DirectLauncher("services.engine", tmp_path / "specs")
    child = start("input()")
    launcher._children[child.pid] = child
    try:
        assert await launcher.exit_status(child.pid, 0.01) is None
    finally:
        child.kill()
    assert await launcher.exit_status(child.pid, 60) == -signal.SIGKILL
    assert child.stdin is not None
    child.stdin.close()
