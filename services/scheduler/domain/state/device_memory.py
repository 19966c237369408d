"""Device memory of an instance: what it holds, and what stopping or suspending it frees."""

from __future__ import annotations

from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Instance
from shared.contracts.node import InstanceState


def per_device_bytes(i: Instance, total: int) -> int:
    """Return the share of `total` bytes on each device: nodes book them evenly."""
    count = len(i.device_ids)
    return total if count == 1 else -(-total // max(1, count))


def suspended_bytes(state: ClusterState, i: Instance) -> int:
    """Return the bytes that a suspended instance holds on each device; 0 for any other."""
    report = state.reports.get(i.instance_id)
    return per_device_bytes(i, report.status.memory.reserved) if report is not None and report.status.state.parked else 0


def held_bytes(state: ClusterState, i: Instance) -> int:
    """Return the bytes that an instance (not a claim) holds on each device."""
    return suspended_bytes(state, i) if i.state.parked else per_device_bytes(i, i.reserve_bytes)


def suspend_frees_bytes(state: ClusterState, i: Instance) -> int:
    """Return the bytes that suspending frees on each device; all of them if it must be stopped."""
    report = state.reports.get(i.instance_id)
    if not can_suspend(state, i) or report is None:
        return held_bytes(state, i)
    return max(0, per_device_bytes(i, i.reserve_bytes) - per_device_bytes(i, report.status.suspension.left_bytes))


def resume_need_bytes(state: ClusterState, i: Instance) -> int:
    """Return the bytes that a suspended instance needs on all devices to resume, held ones
    included.

    Measured where that is known.
    """
    report = state.reports.get(i.instance_id)
    return (report.status.suspension.need_bytes if report else 0) or i.reserve_bytes


def can_suspend(state: ClusterState, i: Instance) -> bool:
    """True if the node can suspend the instance, or has not assessed it yet."""
    report = state.reports.get(i.instance_id)
    if i.state is not InstanceState.READY or report is None:
        return False
    return report.status.suspension.possible or not report.status.suspension.assessed
