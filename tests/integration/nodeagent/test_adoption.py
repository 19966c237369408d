"""Engines and streams survive SIGKILL of the nodeagent; the next one adopts them."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from services.nodeagent import app
from services.nodeagent.settings import NodeagentSettings
from shared.contracts import subjects
from shared.contracts.engine import EngineReport
from shared.contracts.node import InstanceState
from shared.messaging import Mesh
from tests.integration.nodeagent.harness import MIB, ZYGOTE, Node, begin_request, gone, running_node
from tests.support.servers import NatsServer

READY, DRAINING, STOPPED, FAILED = InstanceState.READY, InstanceState.DRAINING, InstanceState.STOPPED, InstanceState.FAILED


@pytest.fixture(params=["direct", "zygote"])
async def node(request: pytest.FixtureRequest, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Node]:
    async with running_node(nats_server.url, tmp_path, **(ZYGOTE if request.param == "zygote" else {})) as found:
        yield found


async def test_streams_survive_a_killed_nodeagent_and_engines_are_adopted(node: Node) -> None:
    instance_id = await node.start({"tokens": 60, "pace": 0.05})
    before = await node.reaches(instance_id, READY)
    chunks: list[bytes] = []
    finished = asyncio.Event()

    async def on_message(message: object) -> None:
        chunks.append(getattr(message, "data", b""))
        if b'"kind":"finished"' in chunks[-1]:
            finished.set()

    await node.mesh.nc.subscribe(f"t.{instance_id}", cb=on_message)
    await begin_request(node, instance_id)
    node.kill_agent()
    (after,) = (await node.start_agent()).instances
    assert after.state is READY
    assert (after.token, after.pids, after.plan_id) == (before.token, before.pids, before.plan_id)
    assert [s.phase for s in after.phases] == [s.phase for s in before.phases]
    assert node.latest.devices[0].reserved_bytes == 100 * MIB
    assert node.statuses[0].boot_id != node.latest.boot_id
    await asyncio.wait_for(finished.wait(), 60)
    assert len(chunks) == 62
    await node.stop(instance_id)
    await node.reaches(instance_id, STOPPED)


async def test_engine_that_reports_before_its_adoption_is_not_drained(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent adopts engines once it is connected, and a report may arrive sooner."""
    connect = Mesh.start_unless
    async with running_node(nats_server.url, tmp_path) as node:
        instance_id = await node.start()
        [pid] = (await node.reaches(instance_id, READY)).pids
        report = EngineReport(instance_id=instance_id, pid=pid, state="ready", progress=1.0)
        node.kill_agent()
        commands: asyncio.Queue[str] = asyncio.Queue()

        async def on_command(message: object) -> None:
            commands.put_nowait(json.loads(getattr(message, "data", b""))["kind"])

        async def connect_and_wait(mesh: Mesh, stop: asyncio.Event) -> bool:
            is_connected = await connect(mesh, stop)
            await mesh.flush()
            await node.mesh.publish(subjects.engine_report(node.name), report)
            await node.mesh.flush()
            await mesh.flush()  # the report has arrived
            for _ in range(100):  # and is handled
                await asyncio.sleep(0)
            return is_connected

        await node.mesh.nc.subscribe(subjects.engine_control(instance_id), cb=on_command)
        await node.mesh.flush()
        monkeypatch.setattr(Mesh, "start_unless", connect_and_wait)
        for name, setting in node.environment.items():
            monkeypatch.setenv(name, setting)
        stop = asyncio.Event()
        running = asyncio.create_task(app.run(NodeagentSettings(), stop))
        assert await asyncio.wait_for(commands.get(), 60) == "ping"
        stop.set()
        assert await asyncio.wait_for(running, 60) == 0


async def test_engine_that_died_without_a_nodeagent_is_found_failed(node: Node) -> None:
    instance_id = await node.start()
    pid = (await node.reaches(instance_id, READY)).pids[0]
    node.kill_agent()
    psutil.Process(pid).kill()
    assert await gone(pid)
    await node.start_agent()
    status = await node.reaches(instance_id, FAILED)
    assert status.error is not None
    assert f"pid {pid}" in status.error.message
    await node.until(lambda s: s.devices[0].reserved_bytes == 0)
    assert node.released == [instance_id]


async def test_reused_pid_of_a_dead_engine_is_not_killed(node: Node) -> None:
    instance_id = await node.start()
    await node.reaches(instance_id, READY)
    node.kill_agent()
    stranger = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        node.edit_record(instance_id, pid=stranger.pid, process_start=1)
        await node.start_agent()
        await node.reaches(instance_id, FAILED)
        await node.until(lambda s: s.devices[0].reserved_bytes == 0)
        assert stranger.returncode is None
    finally:
        stranger.kill()
        await stranger.wait()


async def test_death_of_an_adopted_engine_is_detected(node: Node) -> None:
    instance_id = await node.start()
    pid = (await node.reaches(instance_id, READY)).pids[0]
    node.kill_agent()
    await node.start_agent()
    psutil.Process(pid).send_signal(signal.SIGSEGV)
    status = await node.reaches(instance_id, FAILED)
    assert status.error is not None
    await node.until(lambda s: s.devices[0].reserved_bytes == 0)


async def test_a_stop_continues_under_the_next_agent(node: Node) -> None:
    instance_id = await node.start({"tokens": 10_000, "pace": 0.05})
    await node.reaches(instance_id, READY)
    await begin_request(node, instance_id)
    await node.stop(instance_id, drain_timeout_ms=10_000)
    await node.reaches(instance_id, DRAINING)
    node.kill_agent()
    (adopted,) = (await node.start_agent()).instances
    assert adopted.state is DRAINING
    await node.reaches(instance_id, STOPPED)


async def test_an_engine_without_a_recorded_pid_is_found(node: Node) -> None:
    instance_id = await node.start()
    pids = (await node.reaches(instance_id, READY)).pids
    node.kill_agent()
    node.edit_record(instance_id, process="forking", pid=None, process_start=None, state="preparing", has_reported=False)
    await node.start_agent()
    assert (await node.reaches(instance_id, READY)).pids == pids


async def test_silent_engine_is_killed_after_the_adoption_timeout(nats_server: NatsServer, tmp_path: Path) -> None:
    async with running_node(nats_server.url, tmp_path, THAW_ADOPT_TIMEOUT="3.5") as node:
        instance_id = await node.start({"mute": True, "ignore_term": True})
        pid = (await node.reaches(instance_id, READY)).pids[0]
        node.kill_agent()
        (tmp_path / "nodes" / node.name / "logs" / f"{instance_id}.engine.log.mute").touch()
        await node.start_agent()
        status = await node.reaches(instance_id, FAILED)
        assert status.error is not None
        assert "did not answer" in status.error.message
        assert await gone(pid)
        await node.until(lambda s: s.devices[0].reserved_bytes == 0)


async def test_damaged_records_do_not_stop_the_nodeagent(nats_server: NatsServer, tmp_path: Path) -> None:
    async with running_node(nats_server.url, tmp_path) as node:
        node.kill_agent()
        broken = tmp_path / "nodes" / node.name / "agent" / "instances" / "x.json"
        broken.write_text("{")
        await node.start_agent()
        assert node.latest.instances == ()
        assert not broken.exists()


async def test_nats_restart_does_not_affect_instances(own_nats: NatsServer, tmp_path: Path) -> None:
    async with running_node(own_nats.url, tmp_path) as node:
        instance_id = await node.start()
        before = await node.reaches(instance_id, READY)
        own_nats.restart()
        generated = len(node.statuses)
        after = (await node.until(lambda _: len(node.statuses) > generated + 2)).instances[0]
        assert (after.state, after.pids) == (READY, before.pids)
        await node.stop(instance_id)
        await node.reaches(instance_id, STOPPED)


async def test_a_second_agent_of_a_node_refuses_to_start(node: Node) -> None:
    """A second agent of a node refuses to start.

    It would adopt, start and stop the same engines.
    """
    instance_id = await node.start()
    await node.reaches(instance_id, READY)
    output = node.home / "second.log"
    with output.open("wb") as log:
        second = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.nodeagent", env=node.environment, stdout=log, stderr=log
        )
        assert await asyncio.wait_for(second.wait(), 60) == 2
    assert "Another nodeagent runs with" in output.read_text()
    assert node.instance(instance_id).state is READY
