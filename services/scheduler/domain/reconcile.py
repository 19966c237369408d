"""After every event, all that follows from the state: what is over leaves, what has room starts, what waits is placed.

1. Operators are answered whose wish has come true.
2. Instances leave: of removed or changed models, on drained nodes, past their keep-alive, and starts that nobody wants any more.
3. Claims whose bytes the nodeagent has reported free are sent, in the order they were made; some before that, to wait for them there.
4. Models that want more instances than they have are placed: higher priority first, then the one that has waited longest.
5. With nobody waiting, models that are to be parked ahead of their first request are started for that (ahead.py).
6. With nobody waiting still, weights of models that are likely to be asked for are brought to nodes (prefetching.py).

Only what the event touched is looked at (scope.py), so that a decision costs what it is about and not what there is. What follows from
the mere passing of time is looked at with each Tick.
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
from services.scheduler.domain.state.device_memory import per_device_bytes, suspended_bytes
from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Waiter
from shared.contracts.admin import ModelAsleep
from shared.contracts.node import InstanceState


def reconcile(tx: Transaction, *, everything: bool, only_due: bool = False) -> None:
    """`everything`: look at the whole state, whatever was touched; `only_due`: of its instances, at those that are due."""
    scope = FullScope(tx, only_due=only_due) if everything else ChangedScope(tx)
    reply_to_waiters(tx)  # 1
    promote_parked_starts(tx, scope.models())
    scale_down(tx, scope.instances())  # 2
    start_claims(tx, scope.claimed())  # 3
    if _recovered(tx):
        advance_migrations(tx)
        for first in scale_up_queue(tx, scope.models()):  # 4
            wish: ScaleUp | None = first
            for _ in range(first.model.card.spec.replicas.max):
                if wish is None or not scale_up(tx, wish):
                    break
                start_claims(tx, scope.claimed())
                wish = next_scale_up(tx, tx.state.models[wish.model.key])
        start_parking(tx, scope.models())  # 5
        if only_due:
            start_prefetches(tx)  # 6
        start_claims(tx, scope.claimed())
    reply_to_waiters(tx)


def _recovered(tx: Transaction) -> bool:
    """Whether enough was heard since the term began to place anything."""
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
    """Start what waited for bytes of these devices, as far as they are there."""
    for node, device in devices:
        presence = tx.state.presence.get(node)
        if presence is None or not presence.alive or presence.status is None:
            continue
        if booking_of(tx.state, node, device).free_soon_bytes < 0:
            _give_up_hopeless_claims(tx, node, device)
        for i in claims_on(tx.state, node, device):
            more = per_device_bytes(i, i.reserve_bytes) - suspended_bytes(tx.state, i)
            booked = [booking_of(tx.state, node, each) for each in i.device_ids]
            if any(b.held_bytes + more > b.budget_bytes for b in booked) and not _waits_there(tx, i, more, booked):
                break
            send_start(tx, i)


def _waits_there(tx: Transaction, i: Instance, more: int, booked: list[Booking]) -> bool:
    """Whether it may be sent before its bytes are free: its node will grant them when those that have nothing more to do are gone, and until
    then nothing of it takes memory. (The loader would fetch weights at once.)"""
    if tx.policy.grant_wait_s <= 0 or not (i.is_resume_claim or tx.state.models[i.model].card.spec.loads_itself):
        return False
    return all(b.held_bytes - b.drained_bytes + more <= b.budget_bytes for b in booked)


def _give_up_hopeless_claims(tx: Transaction, node: str, device: str) -> None:
    """Claims whose victims will not leave after all (one was serving) end, the newest first, so that they are placed anew."""
    for i in reversed(claims_on(tx.state, node, device)):
        if booking_of(tx.state, node, device).free_soon_bytes >= 0:
            return
        stop_instance(tx, i, "drain", "its room is not coming free")
