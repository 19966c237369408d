"""The zygote forks engines, and reports exits to every nodeagent.

It outlives the nodeagents; its engines outlive it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shared.contracts.engine import EngineExited, ZygoteFailure
from tests.integration.engine.processes import forked
from tests.integration.nodeagent.harness import gone
from tests.support.engines import Engines, ZygoteClient, ZygoteProcess
from tests.support.segments import FakeLoader, card_of


@pytest.fixture
def own_zygote() -> Iterator[ZygoteProcess]:
    with tempfile.TemporaryDirectory(prefix="thaw-z-") as directory:
        process = ZygoteProcess(Path(directory))
        yield process
        process.close()


async def fork(client: ZygoteClient, engines: Engines, demo: Path) -> tuple[str, int]:
    start = engines.spec(card_of(demo))
    return start.instance_id, await forked(client, start)


async def test_exits_are_reported_to_every_nodeagent(zygote: ZygoteProcess, engines: Engines, demo_directory: Path) -> None:
    first, second = await zygote.connect(), await zygote.connect()
    # No loader serves this engine: it would wait or fail; the test kills it before.
    instance, pid = await fork(first, engines, demo_directory)
    os.kill(pid, signal.SIGKILL)
    for client in (first, second):
        reported = await client.hear()
        assert isinstance(reported, EngineExited)
        assert (reported.instance_id, reported.pid) == (instance, pid)
        assert reported.returncode in (-signal.SIGKILL, 1)
        await client.close()


async def test_forked_engine_has_its_own_session_and_log_file(
    zygote: ZygoteProcess, engines: Engines, demo_directory: Path
) -> None:
    loader = FakeLoader(engines.mesh, engines.node)
    await loader.start()
    client = await zygote.connect()
    instance, pid = await fork(client, engines, demo_directory)
    assert (await engines.settled(instance)).state == "ready"
    assert os.getsid(pid) == pid
    assert str(zygote.socket) not in {str(c.laddr) for c in psutil.Process(pid).net_connections("unix")}
    log = engines.directory / f"{instance}.log"
    assert Path(f"/proc/{pid}/fd/2").resolve() == log
    assert '"message": "ready"' in log.read_text()
    os.kill(pid, signal.SIGTERM)
    reported = await client.hear()
    assert isinstance(reported, EngineExited)
    assert reported.returncode == 0
    await client.close()
    loader.close()


async def test_malformed_command_is_answered_with_a_failure(zygote: ZygoteProcess) -> None:
    client = await zygote.connect()
    client.send(b'{"kind": "nonsense"}')
    assert isinstance(await client.hear(), ZygoteFailure)
    client.send(b"not json")
    assert isinstance(await client.hear(), ZygoteFailure)
    await client.close()


async def test_start_that_cannot_be_decoded_fails_under_its_own_name(
    zygote: ZygoteProcess, engines: Engines, demo_directory: Path
) -> None:
    """The nodeagent, which waits for the answer by this name, may be of another version."""
    client = await zygote.connect()
    start = engines.spec(card_of(demo_directory)).model_dump(mode="json")
    client.send(json.dumps(start | {"kv_bytes": "many"}).encode())
    reported = await client.hear()
    assert isinstance(reported, ZygoteFailure)
    assert (reported.instance_id, reported.error.code) == (start["instance_id"], "invalid_request")
    client.send(b'{"kind": "executor", "executor_id": "x-1"}')
    reported = await client.hear()
    assert isinstance(reported, ZygoteFailure)
    assert reported.instance_id == "x-1"
    await client.close()


async def test_log_file_that_cannot_be_opened_fails_the_fork(zygote: ZygoteProcess, engines: Engines, demo_directory: Path) -> None:
    client = await zygote.connect()
    start = engines.spec(card_of(demo_directory)).model_copy(update={"log_path": "/nonexistent/x.log"})
    client.send(start.model_dump_json().encode())
    reported = await client.hear()
    assert isinstance(reported, ZygoteFailure)
    assert reported.instance_id == start.instance_id
    await client.close()


async def test_engines_survive_their_zygote(own_zygote: ZygoteProcess, engines: Engines, demo_directory: Path) -> None:
    loader = FakeLoader(engines.mesh, engines.node)
    await loader.start()
    client = await own_zygote.connect()
    instance, pid = await fork(client, engines, demo_directory)
    assert (await engines.settled(instance)).state == "ready"
    own_zygote.process.terminate()
    assert await asyncio.to_thread(own_zygote.process.wait, 60) == 0
    assert not own_zygote.socket.exists()
    stream = await engines.answer(instance, "completion", prompt="abc", max_tokens=4)
    assert len(stream.tokens()) == 4
    os.kill(pid, signal.SIGTERM)
    assert await gone(pid)
    await client.close()
    loader.close()


def zygote_command(path: Path) -> list[str]:
    return [sys.executable, "-m", "services.engine.zygote", str(path)]


def test_second_zygote_exits_and_the_first_continues(zygote: ZygoteProcess) -> None:
    second = subprocess.run(zygote_command(zygote.socket), capture_output=True, text=True, timeout=60)
    assert second.returncode == 0
    assert "already served" in second.stdout
    assert zygote.process.poll() is None


def test_a_stale_socket_is_replaced() -> None:
    with tempfile.TemporaryDirectory(prefix="thaw-z-") as directory:
        path = Path(directory) / "z.sock"
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
        fresh = ZygoteProcess(Path(directory))
        assert "ready" in fresh.first_line
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
        fresh.close()


def test_socket_path_over_the_length_limit_is_refused() -> None:
    failed = subprocess.run(zygote_command(Path("/tmp") / ("x" * 200) / "z.sock"), capture_output=True, text=True, timeout=60)
    assert failed.returncode == 1
    assert "cannot listen" in failed.stderr
    (Path("/tmp") / ("x" * 200) / "z.sock.lock").unlink()
    (Path("/tmp") / ("x" * 200)).rmdir()
