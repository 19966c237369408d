"""Faults between suspended and ready, on real processes.

Each ends in a serving engine, or in memory proved free.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from services.nodeagent.suspend.cgroups import open_cgroups
from shared.contracts.node import InstanceState, InstanceStatus
from shared.errors import NotFound
from shared.settings import NodeSettings
from tests.integration.nodeagent.harness import Node, begin_request, gone, running_node
from tests.integration.suspend.suspendable import BIG, ready
from tests.support.servers import NatsServer

READY, SUSPENDED, STOPPED, FAILED = InstanceState.READY, InstanceState.SUSPENDED, InstanceState.STOPPED, InstanceState.FAILED


def scope(node: Node) -> str:
    """Return the name prefix of the node's control groups."""
    return NodeSettings(home=node.home, node=node.name).scope


async def suspended(node: Node, **stub: Any) -> InstanceStatus:
    instance_id = await ready(node, {**BIG, **stub})
    await node.suspend(instance_id)
    return await node.reaches(instance_id, SUSPENDED)


@pytest.mark.parametrize("wake", ["bad_once", "fail", "exit"])
async def test_failed_restore_causes_one_cold_start_and_is_reported(node: Node, wake: str) -> None:
    status = await suspended(node, wake=wake)
    await node.resume(status.instance_id)
    again = await node.reaches(status.instance_id, READY, FAILED)
    assert again.state is READY, again.error
    assert again.pids != status.pids
    assert again.suspension.fell_back is not None
    assert await gone(status.pids[0])
    await begin_request(node, status.instance_id)


async def test_engine_that_does_not_respond_after_a_resume_is_started_cold(
    able: None, nats_server: NatsServer, tmp_path: Path
) -> None:
    async with running_node(nats_server.url, tmp_path, THAW_RESUME_TIMEOUT="1") as node:
        status = await suspended(node, wake="mute")
        await node.resume(status.instance_id)
        await node.until(lambda s: any(i.suspension.fell_back is not None and i.state is READY for i in s.instances))
        assert "did not answer within 1 s" in (node.instance(status.instance_id).suspension.fell_back or status.error).message  # type: ignore[union-attr]  # awaited above


async def test_engine_without_support_for_pause_is_stopped(node: Node) -> None:
    instance_id = await ready(node, {**BIG, "no_hold": True})
    await node.suspend(instance_id)
    status = await node.reaches(instance_id, STOPPED)
    assert status.error is None
    assert node.latest.devices[0].reserved_bytes == 0


async def test_running_requests_finish_before_the_suspension(node: Node) -> None:
    instance_id = await ready(node, {**BIG, "tokens": 10, "pace": 0.05})
    await begin_request(node, instance_id)
    await node.suspend(instance_id)
    await node.seen(lambda s: any(i.state is InstanceState.DRAINING for i in s.instances))
    status = await node.reaches(instance_id, SUSPENDED, STOPPED)
    assert status.state is SUSPENDED


async def test_frozen_engine_can_be_stopped(node: Node) -> None:
    status = await suspended(node, ignore_term=True, children=1)
    await node.stop(status.instance_id)
    await node.reaches(status.instance_id, STOPPED)
    assert await gone(status.pids[0])
    assert node.latest.snapshot_bytes == 0
    with pytest.raises(NotFound):
        await node.resume(status.instance_id)


async def test_killed_suspended_engine_releases_its_reservation(node: Node) -> None:
    status = await suspended(node)
    os.kill(status.pids[0], signal.SIGKILL)
    await node.reaches(status.instance_id, FAILED)
    await node.until(lambda s: s.devices[0].reserved_bytes == 0)


async def test_new_nodeagent_adopts_and_resumes_a_suspended_engine(node: Node) -> None:
    status = await suspended(node)
    node.kill_agent()
    await node.start_agent()
    again = await node.reaches(status.instance_id, SUSPENDED)
    assert again.pids == status.pids
    assert again.memory.reserved == status.memory.reserved
    await node.resume(status.instance_id)
    again = await node.reaches(status.instance_id, READY)
    assert again.pids == status.pids
    assert again.suspension.fell_back is None


async def test_control_group_frozen_by_a_dead_nodeagent_is_thawed(node: Node) -> None:
    instance_id = await ready(node, BIG)
    node.kill_agent()
    node.edit_record(
        instance_id, state="draining", suspend_state={"freezing": True, "outlook": {"way": "cpu"}, "snapshot_bytes": 1}
    )
    groups = open_cgroups(scope(node))
    groups.freeze(instance_id)
    await node.start_agent()
    await node.reaches(instance_id, READY)
    assert not groups.is_frozen(instance_id)
    await begin_request(node, instance_id)


async def test_suspended_engine_that_died_with_the_nodeagent_is_cleaned_up(node: Node) -> None:
    status = await suspended(node)
    node.kill_agent()
    os.kill(status.pids[0], signal.SIGKILL)
    open_cgroups(scope(node)).thaw(status.instance_id)
    assert await gone(status.pids[0])  # the nodeagent resumes a thawed engine that still runs
    await node.start_agent()
    await node.reaches(status.instance_id, FAILED)
    await node.until(lambda s: s.devices[0].reserved_bytes == 0)


async def test_an_orphan_without_a_record_is_reaped(node: Node) -> None:
    status = await suspended(node)
    node.kill_agent()
    (node.home / "nodes" / node.name / "agent" / "instances" / f"{status.instance_id}.json").unlink()
    await node.start_agent()
    assert await gone(status.pids[0])
    assert node.latest.instances == ()


async def test_leaking_engine_is_eventually_stopped(node: Node) -> None:
    # An engine that resumes no faster than it starts is stopped too: its start takes much longer.
    instance_id = await ready(node, {**BIG, "leak_mib": 200, "ready_after": 10.0}, mib=900)
    for _ in range(8):
        await node.suspend(instance_id)
        status = await node.reaches(instance_id, SUSPENDED, STOPPED)
        if status.state is STOPPED:
            return
        await node.resume(instance_id)
        await node.reaches(instance_id, READY)
        await node.until(lambda s: any(i.suspension.possible or "leaks" in i.suspension.reason for i in s.instances))
    raise AssertionError(f"it was suspended again and again: {status.suspension}")


async def test_coldest_snapshot_is_evicted_for_another(able: None, nats_server: NatsServer, tmp_path: Path) -> None:
    async with running_node(nats_server.url, tmp_path, THAW_SNAPSHOT_BYTES="300MiB") as node:
        first = await suspended(node)
        second = await suspended(node)
        await node.reaches(first.instance_id, STOPPED)
        assert node.instance(second.instance_id).state is SUSPENDED
        assert node.latest.snapshot_budget_bytes == 300 << 20


async def test_with_suspension_off_a_suspend_stops_the_engine(nats_server: NatsServer, tmp_path: Path) -> None:
    async with running_node(nats_server.url, tmp_path, THAW_SUSPEND="off") as node:
        instance_id = await node.start(BIG)
        await node.until(lambda s: any("THAW_SUSPEND" in i.suspension.reason for i in s.instances))
        await node.suspend(instance_id)
        await node.reaches(instance_id, STOPPED)


async def test_parked_start_is_suspended_when_ready(node: Node) -> None:
    instance_id = await node.start(BIG, park=True)
    status = await node.reaches(instance_id, SUSPENDED)
    assert status.started is not None
    await node.resume(instance_id)
    await node.reaches(instance_id, READY)
