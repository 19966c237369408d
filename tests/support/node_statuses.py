"""Statuses of nodes and instances with reserved memory."""

from __future__ import annotations

from shared.contracts.node import DeviceStatus, InstanceMemory, InstanceState, InstanceStatus, NodeStatus, Suspension

READY, SUSPENDED = InstanceState.READY, InstanceState.SUSPENDED


def instance(name: str, reserved: int, *devices: str, state: InstanceState = READY, snapshot: int = 0) -> InstanceStatus:
    return InstanceStatus(
        instance_id=name,
        plan_id="p",
        token=1,
        model=name.partition("-")[0],
        generation=1,
        revision="r",
        device_ids=devices,
        state=state,
        memory=InstanceMemory(reserved=reserved),
        suspension=Suspension(snapshot_bytes=snapshot),
    )


def status(reserved: dict[str, int], *instances: InstanceStatus) -> NodeStatus:
    devices = tuple(
        DeviceStatus(device_id=d, kind="cuda" if d.startswith("cuda") else "cpu", budget_bytes=10**12, reserved_bytes=n)
        for d, n in reserved.items()
    )
    return NodeStatus(node="n", boot_id="b", seq=1, devices=devices, instances=instances)
