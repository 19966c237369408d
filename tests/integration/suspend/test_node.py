"""A real nodeagent suspends and resumes real engine processes, end to end.

The tests read memory back.
"""

from __future__ import annotations

import pytest

from shared.errors import InstanceBusy
from tests.integration.nodeagent.harness import MIB, Node, begin_request
from tests.integration.suspend.suspendable import BIG, READY, STOPPED, SUSPENDED, ready


async def test_suspended_engine_frees_its_memory_and_resumes_with_it(node: Node) -> None:
    instance_id = await ready(node, {**BIG, "ready_after": 5.0})
    pid = node.instance(instance_id).pids[0]
    await node.suspend(instance_id)
    status = await node.reaches(instance_id, SUSPENDED)
    assert status.suspension.way == "cpu"
    assert status.suspension.freed_bytes > 150 * MIB
    assert status.suspension.snapshot_bytes > 150 * MIB
    assert status.suspended is not None
    assert node.latest.snapshot_bytes == status.suspension.snapshot_bytes
    assert node.latest.devices[0].reserved_bytes == status.memory.reserved < 100 * MIB
    await node.resume(instance_id)
    status = await node.reaches(instance_id, READY)
    assert status.pids[0] == pid
    assert status.resumed is not None
    assert status.started is not None
    assert status.resumed.took_ms < status.started.took_ms
    assert status.memory.reserved == 400 * MIB
    assert [s.phase.value for s in status.phases] == ["reserve", "restore"]
    await begin_request(node, instance_id)


async def test_engine_asked_to_suspend_right_after_its_start_is_suspended(node: Node) -> None:
    """An engine that must make room once it is ready is suspended.

    Its agent has not assessed it by then: the command waits for that.
    """
    instance_id = await node.start(BIG, mib=400)
    await node.reaches(instance_id, READY)
    await node.suspend(instance_id)
    assert (await node.reaches(instance_id, SUSPENDED, STOPPED)).state is SUSPENDED


async def test_conditional_suspend_of_a_busy_instance_is_refused(node: Node) -> None:
    instance_id = await ready(node, {**BIG, "tokens": 400, "pace": 0.05})
    await begin_request(node, instance_id)
    with pytest.raises(InstanceBusy):
        await node.suspend(instance_id, only_if_idle=True)
    assert node.instance(instance_id).state is READY
