"""Engines forked from a zygote, and the zygote's death.

This zygote forks stub engines; a slow test has the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from services.nodeagent.engines import zygote
from services.nodeagent.engines.zygote import ZygoteLauncher
from shared.contracts.engine import EngineExited, EngineForked, EngineStart, ZygoteFailure
from shared.contracts.executor import ExecutorStart
from shared.contracts.node import InstanceState
from shared.contracts.phases import NEW_ZYGOTE
from shared.errors import EngineFailed, InvalidRequest
from shared.tasks import end
from tests.integration.nodeagent.harness import ZYGOTE, Node, begin_request, card, gone, running_node
from tests.support.servers import NatsServer

READY, STOPPED, FAILED = InstanceState.READY, InstanceState.STOPPED, InstanceState.FAILED


@pytest.fixture
async def node(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Node]:
    async with running_node(nats_server.url, tmp_path, **ZYGOTE) as found:
        yield found


def zygote_of(pid: int) -> psutil.Process:
    parent = psutil.Process(pid).parent()
    assert parent is not None
    assert "tests.support.stub_zygote" in parent.cmdline()
    return parent


async def test_engines_are_forked_and_report_their_exit_status(node: Node) -> None:
    first, second = await node.start(), await node.start()
    pid = (await node.reaches(first, READY)).pids[0]
    await node.reaches(second, READY)
    zygote = zygote_of(pid)
    await begin_request(node, first, exit=3)
    status = await node.reaches(first, FAILED)
    assert status.error is not None
    assert "exit status 3" in status.error.message
    assert node.instance(second).state is READY
    assert await asyncio.to_thread(node.stop_agent) == 0, (node.home / "nodeagent.log").read_text()
    assert await gone(zygote.pid)


async def test_a_failed_fork_is_reported(node: Node) -> None:
    instance_id = await node.start({"fork_error": True})
    status = await node.reaches(instance_id, FAILED)
    assert status.error is not None
    assert status.error.message == "the test refuses forks"
    await node.until(lambda s: s.devices[0].reserved_bytes == 0)


async def test_engines_survive_the_zygotes_death_and_a_new_one_is_started(node: Node) -> None:
    first = await node.start()
    pid = (await node.reaches(first, READY)).pids[0]
    old = zygote_of(pid)
    old.kill()
    second = await node.start()
    zygote = zygote_of((await node.reaches(second, READY)).pids[0])
    assert zygote.pid != old.pid
    assert node.instance(first).state is READY
    await begin_request(node, first, signal=11)
    await node.reaches(first, FAILED)


async def test_the_next_agent_finds_the_same_zygote(node: Node) -> None:
    first = await node.start()
    old = zygote_of((await node.reaches(first, READY)).pids[0])
    node.kill_agent()
    await node.start_agent()
    second = await node.start()
    assert zygote_of((await node.reaches(second, READY)).pids[0]).pid == old.pid
    await begin_request(node, first, exit=4)
    status = await node.reaches(first, FAILED)
    assert status.error is not None
    assert "exit status 4" in status.error.message


async def test_zygote_that_cannot_start_fails_the_start(nats_server: NatsServer, tmp_path: Path) -> None:
    async with running_node(
        nats_server.url, tmp_path, THAW_ZYGOTE="true", THAW_ZYGOTE_MODULE="tests.support.no_such_module"
    ) as node:
        instance_id = await node.start()
        status = await node.reaches(instance_id, FAILED)
        assert status.error is not None
        assert "no_such_module" in status.error.message


async def test_zygote_and_engines_inherit_no_credentials_of_the_node(nats_server: NatsServer, tmp_path: Path) -> None:
    secrets = {"HF_TOKEN": "hf_secret", "AWS_SECRET_ACCESS_KEY": "aws_secret", "THAW_ADMIN_KEY": "admin_secret"}
    async with running_node(nats_server.url, tmp_path, **ZYGOTE, **secrets) as node:
        engine = psutil.Process((await node.reaches(await node.start(), READY)).pids[0])
        for process in (engine, zygote_of(engine.pid)):
            found = process.environ()
            assert not found.keys() & secrets.keys()
            assert found["THAW_NATS_URL"] == nats_server.url, "what it needs of the mesh it has"


@pytest.mark.parametrize(
    ("module", "launcher"), [("tests.support.stub_zygote", "zygote"), ("tests.support.no_such_module", NEW_ZYGOTE)]
)
async def test_launcher_is_warm_once_its_zygote_is_ready_or_has_failed(tmp_path: Path, module: str, launcher: str) -> None:
    with tempfile.TemporaryDirectory(prefix="thaw-z-") as directory:  # a socket path must be short
        zygotes = ZygoteLauncher(Path(directory) / "z", tmp_path / "zygote.log", {}, module)
        running = asyncio.create_task(zygotes.run())
        async with asyncio.timeout(60):
            await zygotes.until_warm()
        assert zygotes.name_for(cast("EngineStart", None)) == launcher
        await zygotes.close()
        await asyncio.wait_for(running, 60)


@pytest.mark.parametrize("reports", [True, False], ids=["late report", "lost zygote"])
async def test_exit_status_is_awaited_while_its_zygote_is_connected(tmp_path: Path, reports: bool) -> None:
    pid, resumed, closed = 2**22 + 1, asyncio.Event(), asyncio.Event()  # no process has this id

    async def fork(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(EngineForked(instance_id="x", pid=pid).model_dump_json().encode() + b"\n")
        await resumed.wait()
        if reports:
            writer.write(EngineExited(instance_id="x", pid=pid, returncode=3).model_dump_json().encode() + b"\n")
            await reader.read()
        writer.close()
        closed.set()

    start = ExecutorStart(executor_id="x", node="n", device="cpu:0", log_path=str(tmp_path / "log"), current_path="c")
    with tempfile.TemporaryDirectory(prefix="thaw-z-") as directory:
        path = Path(directory) / "z"
        async with await asyncio.start_unix_server(fork, path) as server:
            zygotes = ZygoteLauncher(path, tmp_path / "zygote.log", {}, "tests.support.no_such_module")
            running = asyncio.create_task(zygotes.run())
            try:
                assert await zygotes.launch(start) == pid
                status = asyncio.create_task(zygotes.exit_status(pid, 0.01))
                await asyncio.wait((status,), timeout=0.1)
                assert not status.done()
                server.close()  # a lost zygote is not found again
                resumed.set()
                assert await status == (3 if reports else None)
            finally:
                await end(running)
                assert zygotes._writer is not None
                zygotes._writer.close()
                await closed.wait()


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "waits in a driver"])
async def test_zygote_that_hangs_is_killed_and_another_one_forks(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    end_process = zygote._end_process

    async def end_others(pid: int, *signals: signal.Signals) -> None:
        if pid != hung.pid:
            await end_process(pid, *signals)

    monkeypatch.setattr(zygote, "_FORK_WITHIN_S", 3.0)
    if not ends:
        monkeypatch.setattr(zygote, "_end_process", end_others)
    starts = [
        EngineStart(
            instance_id=f"hung-{n}",
            node="hung",
            card=card(),
            device="cpu:0",
            kv_bytes=0,
            log_path=str(tmp_path / f"{n}.log"),
            environment={"THAW_NATS_URL": nats_server.url},
        )
        for n in range(2)
    ]
    engines: list[psutil.Process] = []
    with tempfile.TemporaryDirectory(prefix="thaw-z-") as directory:
        zygotes = ZygoteLauncher(Path(directory) / "z", tmp_path / "zygote.log", {}, "tests.support.stub_zygote")
        running = asyncio.create_task(zygotes.run())
        try:
            async with asyncio.timeout(60):
                await zygotes.until_warm()
            hung = psutil.Process(zygotes._pid)
            hung.suspend()
            engines += map(psutil.Process, await asyncio.gather(*map(zygotes.launch, starts)))
            assert (await gone(hung.pid)) if ends else (hung.status() == psutil.STATUS_STOPPED)
            assert {zygote_of(engine.pid).pid for engine in engines} == {zygotes._pid}
        finally:
            for process in (hung, *engines):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            await gone(hung.pid)
            await zygotes.close()
            await asyncio.wait_for(running, 60)


async def test_zygote_that_never_listens_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote, "_START_WITHIN_S", 0.5)
    with tempfile.TemporaryDirectory(prefix="thaw-z-") as directory:
        zygotes = ZygoteLauncher(Path(directory) / "z", tmp_path / "zygote.log", {}, "tests.support.silent_zygote")
        running = asyncio.create_task(zygotes.run())
        await asyncio.wait_for(zygotes.until_warm(), 60)  # two have failed
        silent = list(zygotes._started)
        try:
            assert [await asyncio.to_thread(process.wait, 60) for process in silent] == [-signal.SIGKILL]
        finally:
            for process in silent:
                process.kill()
            await zygotes.close()
            await asyncio.wait_for(running, 60)


async def served(path: Path) -> None:
    """Wait for the first message of the zygote that is starting on a socket."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_unix_connection(path)
                await reader.readline()
                writer.close()
                return
            await asyncio.sleep(0.01)


async def test_zygote_of_an_earlier_agent_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote, "_START_WITHIN_S", 10.0)
    with tempfile.TemporaryDirectory(prefix="thaw-z-") as directory:
        path = Path(directory) / "z"
        hung = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.support.stub_zygote", str(path))
        zygotes = ZygoteLauncher(path, tmp_path / "zygote.log", {}, "tests.support.stub_zygote")
        try:
            await served(path)
            hung.send_signal(signal.SIGSTOP)
            running = asyncio.create_task(zygotes.run())
            assert await asyncio.wait_for(hung.wait(), 60) == -signal.SIGKILL
            await served(path)
            await zygotes.close()
            await asyncio.wait_for(running, 60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                hung.kill()


async def test_a_start_that_an_older_zygote_cannot_decode_fails(tmp_path: Path) -> None:
    """It leaves the instance's name empty, and outlives the nodeagent's upgrade."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        failure = ZygoteFailure(instance_id="", error=InvalidRequest("No EngineStart").body())
        writer.write(failure.model_dump_json().encode() + b"\n")
        await reader.read()
        writer.close()
        closed.set()

    closed = asyncio.Event()
    start = ExecutorStart(executor_id="x", node="n", device="cpu:0", log_path=str(tmp_path / "log"), current_path="c")
    with tempfile.TemporaryDirectory(prefix="thaw-z-") as directory:
        path = Path(directory) / "z"
        async with await asyncio.start_unix_server(refuse, path):
            zygotes = ZygoteLauncher(path, tmp_path / "zygote.log", {}, "tests.support.no_such_module")
            running = asyncio.create_task(zygotes.run())
            try:
                with pytest.raises(InvalidRequest, match="No EngineStart"):
                    await zygotes.launch(start)
            finally:
                await end(running)
                assert zygotes._writer is not None
                zygotes._writer.close()
                await closed.wait()


async def test_process_with_the_pid_of_an_ended_zygote_gets_no_signal(tmp_path: Path) -> None:
    start = ExecutorStart(executor_id="x", node="n", device="cpu:0", log_path=str(tmp_path / "log"), current_path="c")
    with tempfile.TemporaryDirectory(prefix="thaw-z-") as directory:
        zygotes = ZygoteLauncher(Path(directory) / "z", tmp_path / "zygote.log", {}, "tests.support.no_such_module")
        running = asyncio.create_task(zygotes.run())
        with pytest.raises(EngineFailed, match="does not start"):
            await zygotes.launch(start)
        await end(running)
        stranger = await asyncio.create_subprocess_exec("sleep", "600")
        try:
            zygotes._pid = stranger.pid
            await zygotes.close()
            assert stranger.returncode is None
        finally:
            stranger.kill()
            assert await stranger.wait() == -signal.SIGKILL
