"""Suspended instances: the process stays on its node, its device memory is freed."""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.device_memory import can_suspend, held_bytes, suspend_frees_bytes
from services.scheduler.domain.state.entities import Instance, Leaving
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Cooldown
from services.scheduler.domain.values import replace
from shared.contracts.node import InstanceState


def prefer_suspend(tx: Transaction, i: Instance, how: Leaving) -> Leaving:
    """Return the way of stopping `how`, by suspending where that is possible."""
    if not can_suspend(tx.state, i):
        return how
    return "suspend_if_idle" if how == "if_idle" else "suspend"


def choose_suspensions(
    tx: Transaction, victims: list[Instance], short: int, worth: Callable[[ClusterState, Instance], bool]
) -> dict[str, bool]:
    """Choose which of `victims` are suspended; the others are stopped.

    At least `short` bytes are freed. Candidates are those for which `worth` holds; instances that
    keep most of their memory when suspended are stopped first.
    """
    chosen = {i.instance_id: can_suspend(tx.state, i) and worth(tx.state, i) for i in victims}
    coming = sum(suspend_frees_bytes(tx.state, i) if chosen[i.instance_id] else held_bytes(tx.state, i) for i in victims)
    for i in sorted(victims, key=lambda i: suspend_frees_bytes(tx.state, i) - held_bytes(tx.state, i)):
        if coming >= short:
            break
        if chosen[i.instance_id]:
            chosen[i.instance_id] = False
            coming += held_bytes(tx.state, i) - suspend_frees_bytes(tx.state, i)
    return chosen


def set_suspended(tx: Transaction, i: Instance, state: InstanceState) -> Instance:
    """Record that the instance is suspended until it is needed."""
    tx.drop(Cooldown, i.instance_id)
    parked = replace(i, state=state, leaving="no", leave_reason="", stop_at=None, sent_at=i.sent_at or tx.now)
    tx.put(parked)
    return parked
