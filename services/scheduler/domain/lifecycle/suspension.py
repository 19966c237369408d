"""Suspended instances: their process is on a node, their memory is not on its device. When one leaves so, and for whom."""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.device_memory import frees, held_bytes, suspendable
from services.scheduler.domain.state.entities import Instance, Leaving
from services.scheduler.domain.state.transaction import Draft
from services.scheduler.domain.state.volatile import Pause
from services.scheduler.domain.values import replace
from shared.contracts.node import InstanceState


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
