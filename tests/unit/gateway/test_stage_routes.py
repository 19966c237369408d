"""Stages of a group on several nodes: gateways use the first one, and count the devices of all."""

from __future__ import annotations

from typing import Any

from services.gateway.domain.route_table import RouteTable
from shared.contracts.node import InstanceState, InstanceStatus, NodeStatus
from shared.contracts.stages import GroupPlace


def status(node: str, instance_id: str, **more: Any) -> NodeStatus:
    instance = InstanceStatus(
        instance_id=instance_id,
        plan_id="p",
        token=1,
        model="m",
        generation=1,
        revision="r",
        device_ids=("cpu:0",),
        state=InstanceState.READY,
        **more,
    )
    return NodeStatus(node=node, boot_id="b", seq=1, devices=(), instances=(instance,))


def test_later_stage_is_no_route() -> None:
    table = RouteTable()
    table.on_status(status("a", "i-1.a", group=GroupPlace(first="i-1.a", index=0, count=3)), 0.0)
    table.on_status(status("b", "i-2.b", group=GroupPlace(first="i-1.a", index=1, count=3)), 0.0)
    first = table.get("i-1.a")
    assert first is not None
    assert first.is_ready
    assert first.status.device_count == 3
    assert table.get("i-2.b") is None


def test_instance_without_a_group_counts_its_own_devices() -> None:
    [instance] = status("a", "i-1.a").instances
    assert instance.device_count == 1
