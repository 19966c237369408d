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

from services.scheduler.domain.affected import Everything, Touched
from services.scheduler.domain.demand.replica_targets import Wish, wish_of
from services.scheduler.domain.effects import ReplyTo
from services.scheduler.domain.lifecycle.scale_down import retire
from services.scheduler.domain.lifecycle.scale_up import grant
from services.scheduler.domain.lifecycle.transitions import answer_awake, leave, send_start
from services.scheduler.domain.migration.orders import advance
from services.scheduler.domain.placement.queue import wishes
from services.scheduler.domain.prewarm.parking import park_some, taken_up
from services.scheduler.domain.prewarm.prefetch import prefetch_some
from services.scheduler.domain.state.accounting import booking, claims
from services.scheduler.domain.state.booking import Booking
from services.scheduler.domain.state.device_memory import left_bytes, share
from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.transaction import Draft
from services.scheduler.domain.state.volatile import Waiter
from shared.contracts.admin import ModelAsleep
from shared.contracts.node import InstanceState


def settle(d: Draft, *, everything: bool, only_due: bool = False) -> None:
    """`everything`: look at the whole state, whatever was touched; `only_due`: of its instances, at those that are due."""
    scope = Everything(d, only_due=only_due) if everything else Touched(d)
    answer(d)  # 1
    taken_up(d, scope.models())
    retire(d, scope.instances())  # 2
    send_claims(d, scope.claimed())  # 3
    if _recovered(d):
        advance(d)
        for first in wishes(d, scope.models()):  # 4
            wish: Wish | None = first
            for _ in range(first.model.card.spec.replicas.max):
                if wish is None or not grant(d, wish):
                    break
                send_claims(d, scope.claimed())
                wish = wish_of(d, d.state.models[wish.model.key])
        park_some(d, scope.models())  # 5
        if only_due:
            prefetch_some(d)  # 6
        send_claims(d, scope.claimed())
    answer(d)


def _recovered(d: Draft) -> bool:
    """Whether enough was heard since the term began to place anything."""
    if d.now - d.state.recovered_at >= d.policy.recovery_window:
        return True
    return bool(d.state.presence) and all(p.status is not None for p in d.state.presence.values())


def answer(d: Draft) -> None:
    for w in list(d.state.waiters.values()):
        if w.kind == "wake":
            model = d.state.models.get(w.model)
            ready = next((i for i in d.state.live(model) if i.state is InstanceState.READY), None) if model else None
            if ready is not None:
                answer_awake(d, w, ready)
        elif set(w.instances) <= set(w.gone):
            d.drop(Waiter, w.waiter)
            d.emit(ReplyTo(w.waiter, ModelAsleep(instances=w.instances, freed_bytes=w.freed_bytes)))


def send_claims(d: Draft, devices: list[tuple[str, str]]) -> None:
    """Start what waited for bytes of these devices, as far as they are there."""
    for node, device in devices:
        presence = d.state.presence.get(node)
        if presence is None or not presence.alive or presence.status is None:
            continue
        if booking(d.state, node, device).coming < 0:
            _give_up_hopeless_claims(d, node, device)
        for i in claims(d.state, node, device):
            more = share(i, i.reserve_bytes) - left_bytes(d.state, i)
            booked = [booking(d.state, node, each) for each in i.device_ids]
            if any(b.held + more > b.budget for b in booked) and not _waits_there(d, i, more, booked):
                break
            send_start(d, i)


def _waits_there(d: Draft, i: Instance, more: int, booked: list[Booking]) -> bool:
    """Whether it may be sent before its bytes are free: its node will grant them when those that have nothing more to do are gone, and until
    then nothing of it takes memory. (The loader would fetch weights at once.)"""
    if d.policy.grant_wait <= 0 or not (i.resumes or d.state.models[i.model].card.spec.loads_itself):
        return False
    return all(b.held - b.going + more <= b.budget for b in booked)


def _give_up_hopeless_claims(d: Draft, node: str, device: str) -> None:
    """Claims whose victims will not leave after all (one was serving) end, the newest first, so that they are placed anew."""
    for i in reversed(claims(d.state, node, device)):
        if booking(d.state, node, device).coming >= 0:
            return
        leave(d, i, "drain", "its room is not coming free")
