"""A real nodeagent and engines: from start to ready, from stop to free memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from shared.contracts import subjects
from shared.contracts.node import InstanceState, StatusWanted
from shared.contracts.phases import Phase
from shared.errors import InstanceBusy, InsufficientMemory, StaleToken
from tests.integration.nodeagent.harness import MIB, Node, begin_request, gone, running_node
from tests.support.servers import NatsServer

READY, DRAINING, STOPPED, FAILED = InstanceState.READY, InstanceState.DRAINING, InstanceState.STOPPED, InstanceState.FAILED


async def test_started_instance_becomes_ready_with_all_phases(node: Node) -> None:
    instance_id = await node.start({"ready_after": 0.2})
    status = await node.reaches(instance_id, READY)
    assert [s.phase for s in status.phases] == [Phase.SCHEDULE, Phase.RESERVE, Phase.CONTAINER, Phase.LIBRARIES, Phase.INIT]
    assert all(s.end_ms <= 50 for s in status.phases)
    assert psutil.pid_exists(status.pids[0])
    assert status.memory.reserved == 100 * MIB
    assert node.latest.devices[0].reserved_bytes == 100 * MIB
    measured = await node.until(lambda s: s.instances[0].memory.private > MIB)
    assert (await node.until(lambda s: s.devices[0].used_bytes > MIB)).devices[0].used_bytes >= measured.instances[
        0
    ].memory.private // 2


async def test_a_stop_proves_the_memory_free(node: Node) -> None:
    instance_id = await node.start()
    pid = (await node.reaches(instance_id, READY)).pids[0]
    await node.until(lambda s: s.instances[0].memory.private > 0)  # measured after that
    await node.stop(instance_id)
    status = await node.reaches(instance_id, STOPPED)
    assert await gone(pid)
    assert node.released == [instance_id]
    assert status.freed_bytes is not None
    assert status.freed_bytes > node.freed_bytes
    assert status.error is None
    assert node.latest.devices[0].reserved_bytes == 0


async def test_conditional_stop_of_a_busy_instance_is_refused(node: Node) -> None:
    instance_id = await node.start({"tokens": 10_000, "pace": 0.05})
    await node.reaches(instance_id, READY)
    await begin_request(node, instance_id)
    with pytest.raises(InstanceBusy):
        await node.stop(instance_id, only_if_idle=True)
    assert node.instance(instance_id).state is READY


async def test_conditional_stop_of_an_idle_instance_succeeds(node: Node) -> None:
    instance_id = await node.start()
    await node.reaches(instance_id, READY)
    await node.stop(instance_id, only_if_idle=True)
    await node.reaches(instance_id, STOPPED)


async def test_a_drain_lets_running_requests_finish(node: Node) -> None:
    instance_id = await node.start({"tokens": 40, "pace": 0.05})
    await node.reaches(instance_id, READY)
    finished = asyncio.Event()

    async def on_message(message: object) -> None:
        if b'"kind":"finished"' in getattr(message, "data", b""):
            finished.set()

    await node.mesh.nc.subscribe(f"t.{instance_id}", cb=on_message)
    await begin_request(node, instance_id)
    await node.stop(instance_id)
    await node.seen(lambda s: any(i.instance_id == instance_id and i.state is DRAINING for i in s.instances))
    await node.reaches(instance_id, STOPPED)
    assert finished.is_set()


@pytest.mark.parametrize("stub", [{}, {"ignore_term": True}, {"ignore_term": True, "ignore_drain": True}], ids=str)
async def test_drain_is_ended_at_its_timeout(node: Node, stub: dict[str, bool]) -> None:
    instance_id = await node.start({"tokens": 10_000, "pace": 0.05, **stub})
    pid = (await node.reaches(instance_id, READY)).pids[0]
    await begin_request(node, instance_id)
    await node.stop(instance_id, drain_timeout_ms=200)
    await node.reaches(instance_id, STOPPED)
    assert await gone(pid)


async def test_loading_engine_is_stopped_immediately(node: Node) -> None:
    instance_id = await node.start({"never_ready": True, "ignore_term": True})
    await node.reaches(instance_id, InstanceState.LOADING)
    await node.stop(instance_id)
    await node.reaches(instance_id, STOPPED)


async def test_stop_right_after_the_start_frees_its_reservation(node: Node) -> None:
    instance_id = await node.start({"never_ready": True})
    await node.stop(instance_id)
    await node.reaches(instance_id, STOPPED)
    assert node.latest.devices[0].reserved_bytes == 0


async def test_reported_engine_failure_keeps_its_error(node: Node) -> None:
    instance_id = await node.start({"fail": {"code": "checkpoint_invalid", "message": "truncated", "status": 422}})
    await node.reaches(instance_id, FAILED)
    status = (await node.until(lambda s: s.devices[0].reserved_bytes == 0)).instances[0]
    assert status.error is not None
    assert (status.error.code, status.error.message) == ("checkpoint_invalid", "truncated")
    assert node.released == [instance_id]


async def test_a_crash_while_loading_names_status_and_log(node: Node) -> None:
    instance_id = await node.start({"exit": 7})
    status = await node.reaches(instance_id, FAILED)
    assert status.error is not None
    assert status.error.code == "engine_failed"
    assert "exit status 7" in status.error.message
    assert "exit as requested" in status.error.message


@pytest.mark.usefixtures("kernel_kills")
async def test_crash_of_a_ready_engine_is_detected_immediately(node: Node) -> None:
    instance_id = await node.start()
    await node.reaches(instance_id, READY)
    await begin_request(node, instance_id, signal=9)
    status = await node.reaches(instance_id, FAILED)
    assert status.error is not None
    assert "signal 9 (SIGKILL)" in status.error.message
    assert (await node.until(lambda s: s.devices[0].reserved_bytes == 0)).instances[0].freed_bytes is not None


async def test_start_without_memory_is_refused_until_another_stops(node: Node) -> None:
    first = await node.start(mib=600)
    with pytest.raises(InsufficientMemory, match="do not fit cpu:0 now") as later:
        await node.start(mib=600)
    assert later.value.should_retry
    with pytest.raises(InsufficientMemory, match="can never fit") as never:
        await node.start(mib=2000)
    assert never.value.should_retry is False
    await node.reaches(first, READY)
    await node.stop(first)
    await node.reaches(first, STOPPED)
    second = await node.start(mib=600)
    await node.reaches(second, READY)


async def test_a_repeated_start_is_harmless(node: Node) -> None:
    instance_id = await node.start(instance_id="twice", token=(1 << 32) + 5)
    await node.start(instance_id="twice", token=(1 << 32) + 5)
    await node.reaches(instance_id, READY)
    await node.start(instance_id="twice", token=(1 << 32) + 5)
    assert len(node.latest.instances) == 1


async def test_stale_tokens_are_refused_and_remembered(node: Node) -> None:
    instance_id = await node.start(token=(7 << 32) + 5)
    await node.reaches(instance_id, READY)
    with pytest.raises(StaleToken):
        await node.stop(instance_id, token=(7 << 32) + 4)
    with pytest.raises(StaleToken):
        await node.start(token=(6 << 32) + 9)
    node.kill_agent()
    await node.start_agent()
    with pytest.raises(StaleToken):
        await node.start(token=(6 << 32) + 9)


async def test_an_unknown_instance_is_stopped_already(node: Node) -> None:
    await node.stop("never-started")


async def test_start_without_progress_fails_and_a_slow_one_continues(node: Node) -> None:
    slow = await node.start({"ready_after": 10.0, "progress_every": 0.2}, init_timeout=8.0)
    stuck = await node.start({"never_ready": True}, init_timeout=8.0)
    status = await node.reaches(stuck, FAILED)
    assert status.error is not None
    assert "no progress for 8 s" in status.error.message
    await node.reaches(slow, READY)


async def test_unreleased_weights_stay_booked_until_the_loader_answers(node: Node) -> None:
    instance_id = await node.start()
    pid = (await node.reaches(instance_id, READY)).pids[0]
    await node.loader_off()
    await node.stop(instance_id)
    await node.until(lambda s: not s.instances[0].pids)
    assert await gone(pid)
    assert node.instance(instance_id).state is DRAINING
    assert node.latest.devices[0].reserved_bytes == 100 * MIB
    await node.loader_on()
    await node.reaches(instance_id, STOPPED)
    assert node.latest.devices[0].reserved_bytes == 0


async def test_status_is_published_on_request_and_periodically(node: Node) -> None:
    generated = len(node.statuses)
    await node.mesh.publish(subjects.STATUS_WANTED, StatusWanted())
    await node.until(lambda _: len(node.statuses) > generated + 1)
    assert node.statuses[-1].seq > node.statuses[-2].seq


async def test_clean_shutdown_stops_engines_and_removes_records(node: Node) -> None:
    instance_id = await node.start()
    pid = (await node.reaches(instance_id, READY)).pids[0]
    assert await asyncio.to_thread(node.stop_agent) == 0
    assert await gone(pid)
    assert node.records == []
    await node.seen(lambda s: s.stopping and bool(s.instances))
    assert node.released == [instance_id]


async def test_an_unowned_engine_is_drained(node: Node, tmp_path: Path) -> None:
    instance_id = await node.start()
    pid = (await node.reaches(instance_id, READY)).pids[0]
    node.kill_agent()
    (tmp_path / "nodes" / node.name / "agent" / "instances" / f"{instance_id}.json").unlink()
    await node.start_agent()
    assert await gone(pid)


async def test_logs_of_engines_and_zygote_are_bounded_without_a_supervisor(nats_server: NatsServer, tmp_path: Path) -> None:
    limit = 64 * 1024
    async with running_node(nats_server.url, tmp_path, THAW_ENGINE_LOG_BYTES=str(limit)) as node:
        instance_id = await node.start()
        await node.reaches(instance_id, READY)
        logs = tmp_path / "nodes" / node.name / "logs"
        paths = [logs / f"{instance_id}.engine.log", logs / "zygote.log", logs / "spares.log"]
        for path in paths:
            with path.open("ab") as writer:
                writer.write(b"x" * limit + b"the last line before")
        async with asyncio.timeout(60):
            while any(path.stat().st_size > limit for path in paths):  # noqa: ASYNC110 - another process does it
                await asyncio.sleep(0.05)
        for path in paths:
            assert path.with_name(f"{path.name}.1").read_bytes().endswith(b"x" * limit + b"the last line before")
        with paths[0].open("ab") as writer:
            writer.write(b"and after")
        assert paths[0].read_bytes().endswith(b"and after")
        assert paths[0].stat().st_size < limit
