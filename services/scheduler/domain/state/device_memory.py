"""What an instance holds of its devices, and what would come free of them."""

from __future__ import annotations

from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Instance
from shared.contracts.node import InstanceState


def per_device_bytes(i: Instance, total: int) -> int:
    """The part of an instance's bytes that lies on each of its devices: nodes book them evenly."""
    count = len(i.device_ids)
    return total if count == 1 else -(-total // max(1, count))


def suspended_bytes(state: ClusterState, i: Instance) -> int:
    """What a suspended instance still holds of each of its devices, as its node has measured it; 0 of any other."""
    seen = state.reports.get(i.instance_id)
    return per_device_bytes(i, seen.status.memory.reserved) if seen is not None and seen.status.state.parked else 0


def held_bytes(state: ClusterState, i: Instance) -> int:
    """What an instance that is no claim holds of each of its devices."""
    return suspended_bytes(state, i) if i.state.parked else per_device_bytes(i, i.reserve_bytes)


def suspend_frees_bytes(state: ClusterState, i: Instance) -> int:
    """What comes free of each of its devices if the instance is suspended, as its node expects; all that it holds if it cannot be."""
    seen = state.reports.get(i.instance_id)
    if not can_suspend(state, i) or seen is None:
        return held_bytes(state, i)
    return max(0, per_device_bytes(i, i.reserve_bytes) - per_device_bytes(i, seen.status.suspension.left_bytes))


def resume_need_bytes(state: ClusterState, i: Instance) -> int:
    """What a suspended instance needs of all its devices to come back, what it still holds included: measured where that is known."""
    seen = state.reports.get(i.instance_id)
    return (seen.status.suspension.need_bytes if seen else 0) or i.reserve_bytes


def can_suspend(state: ClusterState, i: Instance) -> bool:
    """Whether its node says that it would be suspended rather than stopped, or has not found out yet: asked to, it does."""
    seen = state.reports.get(i.instance_id)
    if i.state is not InstanceState.READY or seen is None:
        return False
    return seen.status.suspension.possible or not seen.status.suspension.assessed
