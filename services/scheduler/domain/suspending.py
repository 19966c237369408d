"""Suspended instances: their process is on a node, their memory is not on its device. What they hold, and when one leaves so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from services.scheduler.domain.entities import Instance, Leaving
from services.scheduler.domain.heard import Pause
from services.scheduler.domain.values import replace
from shared.contracts.node import InstanceState

if TYPE_CHECKING:
    from services.scheduler.domain.draft import Draft
    from services.scheduler.domain.state import ClusterState


def share(i: Instance, total: int) -> int:
    """The part of an instance's bytes that lies on each of its devices: nodes book them evenly."""
    count = len(i.device_ids)
    return total if count == 1 else -(-total // max(1, count))


def left_bytes(state: ClusterState, i: Instance) -> int:
    """What a suspended instance still holds of each of its devices, as its node has measured it; 0 of any other."""
    seen = state.seen.get(i.instance_id)
    return share(i, seen.status.memory.reserved) if seen is not None and seen.status.state.parked else 0


def held_bytes(state: ClusterState, i: Instance) -> int:
    """What an instance that is no claim holds of each of its devices."""
    return left_bytes(state, i) if i.state.parked else share(i, i.reserve_bytes)


def frees(state: ClusterState, i: Instance) -> int:
    """What comes free of each of its devices if the instance is suspended, as its node expects; all that it holds if it cannot be."""
    seen = state.seen.get(i.instance_id)
    if not suspendable(state, i) or seen is None:
        return held_bytes(state, i)
    return max(0, share(i, i.reserve_bytes) - share(i, seen.status.suspension.left_bytes))


def need_bytes(state: ClusterState, i: Instance) -> int:
    """What a suspended instance needs of all its devices to come back, what it still holds included: measured where that is known."""
    seen = state.seen.get(i.instance_id)
    return (seen.status.suspension.need_bytes if seen else 0) or i.reserve_bytes


def suspendable(state: ClusterState, i: Instance) -> bool:
    """Whether its node says that it would be suspended rather than stopped, or has not found out yet: asked to, it does."""
    seen = state.seen.get(i.instance_id)
    if i.state is not InstanceState.READY or seen is None:
        return False
    return seen.status.suspension.possible or not seen.status.suspension.assessed


def gently(d: Draft, i: Instance, how: Leaving) -> Leaving:
    """`how`, by suspending where that is possible."""
    if not suspendable(d.state, i):
        return how
    return "suspend_if_idle" if how == "if_idle" else "suspend"


def make_way(d: Draft, victims: list[Instance], short: int, worth: Callable[[ClusterState, Instance], bool]) -> dict[str, bool]:
    """Which of `victims` are suspended (the others are stopped) so that at least `short` bytes come free: those for which it is `worth`
    doing. Those that a suspension would leave most of are stopped first."""
    chosen = {i.instance_id: suspendable(d.state, i) and worth(d.state, i) for i in victims}
    coming = sum(frees(d.state, i) if chosen[i.instance_id] else held_bytes(d.state, i) for i in victims)
    for i in sorted(victims, key=lambda i: frees(d.state, i) - held_bytes(d.state, i)):
        if coming >= short:
            break
        if chosen[i.instance_id]:
            chosen[i.instance_id] = False
            coming += held_bytes(d.state, i) - frees(d.state, i)
    return chosen


def park(d: Draft, i: Instance, state: InstanceState) -> Instance:
    """It is suspended, and stays so until somebody wants it."""
    d.drop(Pause, i.instance_id)
    parked = replace(i, state=state, leaving="no", leave_reason="", stop_at=None, sent_at=i.sent_at or d.now)
    d.put(parked)
    return parked
