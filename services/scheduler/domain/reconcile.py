"""Reconcile the cluster with what operators and requests want, after every event.

1. Answer the operators whose wake or sleep is done.
2. Stop instances: of removed or changed models, on drained nodes, past their keep-alive, and
   starts without demand.
3. Send the claims whose memory the nodeagent has reported free, oldest first; some are sent
   earlier and wait on the node.
4. Place models that need more instances, in the profile's order.
5. Without waiting requests, start the models that are to be parked (prewarm/parking.py).
6. Without waiting requests, prefetch weights (prewarm/prefetch.py).

Each event examines only what it affects (affected.py), so that the cost of a decision does not
grow with the cluster. A Tick examines what follows from the passing of time.
"""

from __future__ import annotations

from services.scheduler.domain.affected import ChangedScope, FullScope
from services.scheduler.domain.demand.replica_targets import ScaleUp, next_scale_up
from services.scheduler.domain.effects import ReplyTo
from services.scheduler.domain.lifecycle.scale_down import scale_down
from services.scheduler.domain.lifecycle.scale_up import scale_up
from services.scheduler.domain.lifecycle.transitions import reply_awake, send_start, stop_instance
from services.scheduler.domain.migration.orders import advance_migrations
from services.scheduler.domain.placement.queue import scale_up_queue
from services.scheduler.domain.prewarm.parking import promote_parked_starts, start_parking
from services.scheduler.domain.prewarm.prefetch import start_prefetches
from services.scheduler.domain.state.accounting import booking_of, claims_on
from services.scheduler.domain.state.booking import Booking
from services.scheduler.domain.state.device_memory import suspended_bytes
from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.shared_weights import claim_bytes
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Waiter
from shared.contracts.admin import ModelAsleep
from shared.contracts.node import InstanceState


def reconcile(tx: Transaction, *, everything: bool, only_due: bool = False) -> None:
    """Carry out the steps of this module.

    Args:
        tx: The decision's transaction.
        everything: Examine the whole state, not only what has changed.
        only_due: With `everything`: of the instances, only those that are due.
    """
    scope = FullScope(tx, only_due=only_due) if everything else ChangedScope(tx)
    reply_to_waiters(tx)  # 1
    promote_parked_starts(tx, scope.models())
    scale_down(tx, scope.instances())  # 2
    start_claims(tx, scope.list_claimed())  # 3
    if _has_recovered(tx):
        advance_migrations(tx)
        for first in scale_up_queue(tx, scope.models()):  # 4
            needed: ScaleUp | None = first
            for _ in range(first.model.card.spec.replicas.max):
                if needed is None or not scale_up(tx, needed):
                    break
                start_claims(tx, scope.list_claimed())
                needed = next_scale_up(tx, tx.state.models[needed.model.key])
        start_parking(tx, scope.models())  # 5
        if only_due:
            start_prefetches(tx)  # 6
        start_claims(tx, scope.list_claimed())
    reply_to_waiters(tx)


def _has_recovered(tx: Transaction) -> bool:
    """True if enough nodes have reported since the term began to place anything."""
    if tx.now - tx.state.recovered_at >= tx.policy.recovery_window_s:
        return True
    return bool(tx.state.presence) and all(p.status is not None for p in tx.state.presence.values())


def reply_to_waiters(tx: Transaction) -> None:
    for w in list(tx.state.waiters.values()):
        if w.kind == "wake":
            model = tx.state.models.get(w.model)
            ready = next((i for i in tx.state.live_instances(model) if i.state is InstanceState.READY), None) if model else None
            if ready is not None:
                reply_awake(tx, w, ready)
        elif set(w.instances) <= set(w.stopped):
            tx.drop(Waiter, w.waiter)
            tx.emit(ReplyTo(w.waiter, ModelAsleep(instances=w.instances, freed_bytes=w.freed_bytes)))


def start_claims(tx: Transaction, devices: list[tuple[str, str]]) -> None:
    """Start the claims on these devices whose memory is free."""
    for node, device in devices:
        presence = tx.state.presence.get(node)
        if presence is None or not presence.alive or presence.status is None:
            continue
        if booking_of(tx.state, node, device).free_soon_bytes < 0:
            _cancel_unfillable_claims(tx, node, device)
        for i in claims_on(tx.state, node, device):
            more = claim_bytes(tx.state, i, device) - suspended_bytes(tx.state, i)
            booked = [booking_of(tx.state, node, each) for each in i.device_ids]
            if any(b.held_bytes + more > b.budget_bytes for b in booked) and not _can_wait_on_node(tx, i, more, booked):
                break
            send_start(tx, i)


def _can_wait_on_node(tx: Transaction, i: Instance, more: int, booked: list[Booking]) -> bool:
    """True if a claim may be sent before its memory is free.

    The node grants the memory once the drained instances there are gone, and until then nothing of
    the claim uses memory. (The loader would fetch weights at once.)
    """
    if tx.policy.grant_wait_s <= 0 or not (i.is_resume_claim or tx.state.models[i.model].card.spec.loads_itself):
        return False
    return all(b.held_bytes - b.drained_bytes + more <= b.budget_bytes for b in booked)


def _cancel_unfillable_claims(tx: Transaction, node: str, device: str) -> None:
    """Cancel claims whose victims do not stop after all, newest first: they are placed again."""
    for i in reversed(claims_on(tx.state, node, device)):
        if booking_of(tx.state, node, device).free_soon_bytes >= 0:
            return
        stop_instance(tx, i, "drain", "its memory is not becoming free")
