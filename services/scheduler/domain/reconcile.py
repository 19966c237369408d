"""Reconcile the cluster with what operators and requests want, after every event.

1. Answer the operators whose wake or sleep is done.
2. Stop instances: of removed or changed models, on drained nodes, past their keep-alive, and
   starts without demand.
3. Send the claims whose memory the nodeagents have reported free, oldest first; some are sent
   earlier and wait on the node. The stages of a group are sent together, or none.
4. Place models that need more instances, in the profile's order.
5. Without waiting requests, start the models that are to be parked (prewarm/parking.py).
6. Without waiting requests, prefetch weights (prewarm/prefetch.py).
7. Begin, repeat and answer operators' pulls, and drop old ones (prewarm/pulls.py).

Each event examines only what it affects (affected.py), so that the cost of a decision does not
grow with the cluster. A Tick examines what follows from the passing of time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from services.scheduler.domain.affected import ChangedScope, FullScope
from services.scheduler.domain.demand.replica_targets import ScaleUp, next_scale_up
from services.scheduler.domain.effects import ReplyTo
from services.scheduler.domain.lifecycle.full_workers import end_unfillable_promises
from services.scheduler.domain.lifecycle.scale_down import scale_down
from services.scheduler.domain.lifecycle.scale_up import scale_up
from services.scheduler.domain.lifecycle.transitions import is_loaded_by_node, reply_awake, send_start, stop_instance
from services.scheduler.domain.migration.orders import advance_migrations
from services.scheduler.domain.placement.queue import scale_up_queue
from services.scheduler.domain.prewarm.parking import promote_parked_starts, start_parking
from services.scheduler.domain.prewarm.prefetch import start_prefetches
from services.scheduler.domain.prewarm.pulls import advance_pulls
from services.scheduler.domain.state.accounting import booking_of, claims_on
from services.scheduler.domain.state.booking import Booking
from services.scheduler.domain.state.device_memory import suspended_bytes
from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.shared_weights import claim_bytes
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Waiter
from shared.contracts.admin import ModelAsleep
from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase


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
    advance_pulls(tx)  # 7
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
        elif w.kind == "sleep" and set(w.instances) <= set(w.stopped):
            tx.drop(Waiter, w.waiter)
            tx.emit(ReplyTo(w.waiter, ModelAsleep(instances=w.instances, freed_bytes=w.freed_bytes)))


def start_claims(tx: Transaction, devices: list[tuple[str, str]]) -> None:
    """Start the claims on these devices whose memory is free on all devices that they need.

    A claim leaves free what older claims wait for on its devices. The oldest claim of all therefore
    waits for victims only, and no two groups that share devices wait for each other.
    """
    for node, device in devices:
        if not _is_open(tx, node):
            continue
        cancel_unfillable(tx, node, device)
        for i in claims_on(tx.state, node, device):
            if len(tx.state.stages_behind(i.instance_id)) < i.stages - 1:
                # Later stages are not stored: they were lost with the leader.
                stop_instance(tx, i, "drain", "its leader ended before the stages were started")
                continue
            needs = [_Need(b, more, _bytes_before(tx, i, b)) for b, more in _list_needs(tx, i)]
            if all(_is_open(tx, n.booking.node) for n in needs) and (
                all(n.fits() for n in needs) or _can_wait_on_node(tx, i, needs)
            ):
                send_start(tx, i)


class _Need(NamedTuple):
    """Bytes that a claim needs on one of its devices, and those that older claims wait for."""

    booking: Booking
    more: int
    before: int

    def fits(self, drained: int = 0) -> bool:
        """True if the bytes are free once `drained` bytes are."""
        return self.booking.held_bytes - drained + self.before + self.more <= self.booking.budget_bytes


def _is_open(tx: Transaction, node: str) -> bool:
    presence = tx.state.presence.get(node)
    return presence is not None and presence.alive and presence.status is not None


def _list_needs(tx: Transaction, i: Instance) -> Iterator[tuple[Booking, int]]:
    """Yield the devices of a claim, and of the later stages of a group, with the bytes it needs."""
    for device in i.device_ids:
        yield booking_of(tx.state, i.node, device), claim_bytes(tx.state, i, device) - suspended_bytes(tx.state, i)
    for stage in tx.state.stages_behind(i.instance_id):
        yield booking_of(tx.state, stage.node, stage.device_id), stage.reserve_bytes


def _bytes_before(tx: Transaction, i: Instance, b: Booking) -> int:
    """Return the bytes that claims older than `i` wait for on a device."""
    claims = claims_on(tx.state, b.node, b.device_id)
    older = takewhile(lambda x: x.instance_id != i.instance_id, claims)
    return sum(more for x in older for at, more in _list_needs(tx, x) if at.key == b.key)


def _can_wait_on_node(tx: Transaction, i: Instance, needs: list[_Need]) -> bool:
    """True if a claim may be sent before its memory is free.

    The node grants the memory once the leaving instances there are gone, and until then nothing of
    the claim uses memory:

    1. A start in an executor: the nodeagent has the loader load the weights after the grant. Its
       victims have drained, or are idle. The start is stopped if one of those is in use after all.
    2. A resumption, or an engine that loads its weights itself: its victims have drained.

    (Otherwise the loader would fetch weights at once.)
    """
    if tx.policy.grant_wait_s <= 0:
        return False
    spec = tx.state.models[i.model].card.spec
    if is_loaded_by_node(tx.state.models[i.model], i):  # 1
        return all(n.fits(n.booking.departing_bytes) for n in needs)
    return (i.is_resume_claim or spec.loads_itself) and all(n.fits(n.booking.drained_bytes) for n in needs)  # 2


def cancel_unfillable(tx: Transaction, node: str, device: str) -> None:
    """Give up what waits for memory of victims that do not stop after all, newest first.

    Promises end, claims are cancelled, and starts that wait on their node are stopped. The models
    are placed again.
    """
    if booking_of(tx.state, node, device).free_soon_bytes >= 0:
        return
    end_unfillable_promises(tx, node, device)
    waiting = [i for i in tx.state.holders_on(node, device) if i.is_claim or _waits_on_node(tx, i)]
    for i in sorted(waiting, key=lambda i: (i.planned_at, i.token), reverse=True):
        if booking_of(tx.state, node, device).free_soon_bytes >= 0:
            return
        stop_instance(tx, i, "drain", "its memory is not becoming free")


def _waits_on_node(tx: Transaction, i: Instance) -> bool:
    """True if a start was sent, and its node has not reported that it began."""
    if i.state is not InstanceState.PREPARING or i.is_claim or i.leaving != "no":
        return False
    report = tx.state.reports.get(i.instance_id)
    return report is None or report.status.phase is Phase.RESERVE
