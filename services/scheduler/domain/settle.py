"""After every event, all that follows from the state: what is over leaves, what has room starts, what waits is placed.

1. Operators are answered whose wish has come true.
2. Instances leave: of removed or changed models, on drained nodes, past their keep-alive, and starts that nobody wants any more.
3. Claims whose bytes the nodeagent has reported free are sent, in the order they were made.
4. Models that want more instances than they have are placed: higher priority first, then the one that has waited longest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.scheduler.domain.booking import booking, claims
from services.scheduler.domain.draft import Draft
from services.scheduler.domain.effects import ReplyTo
from services.scheduler.domain.entities import Instance, Model, Pressure, Unmet, Waiter
from services.scheduler.domain.lifecycle import answer_awake, begin, give_up, leave, send_start
from services.scheduler.domain.placement import Placement, place
from shared.contracts.admin import ModelAsleep
from shared.contracts.node import InstanceState
from shared.contracts.plans import PlanRecord


@dataclass(frozen=True, slots=True)
class Wish:
    """One more instance that a model wants, and why. It has been waited for `since`, and known of here since `heard`."""

    model: Model
    trigger: str
    since: float
    heard: float
    extra: bool = False


def settle(d: Draft) -> None:
    answer(d)  # 1
    retire(d)  # 2
    send_claims(d)  # 3
    if _recovered(d):
        for wish in wishes(d):  # 4
            _grant(d, wish)
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


def retire(d: Draft) -> None:
    for i in list(d.state.instances.values()):
        if i.leaving == "no" and (order := _must_leave(d, i)) is not None:
            how, reason = order
            leave(d, i, "drain" if how == "drain" else "if_idle", reason)


def _must_leave(d: Draft, i: Instance) -> tuple[str, str] | None:
    model = d.state.models.get(i.model)
    if model is None:
        return "drain", "its model was removed"
    busy = d.paused(i.instance_id)
    idle = d.idle_since(i.instance_id)
    ready = i.state is InstanceState.READY
    if i.generation != model.card.generation:
        if not ready:
            return "drain", "its model was changed"
        return ("if_idle", "its model was changed") if idle is not None and not busy else None
    node = d.state.nodes.get(i.node)
    if node is not None and node.drain_since is not None:
        if not ready or d.now - node.drain_since > d.policy.drain_timeout:
            return "drain", f"{node.name} is drained"
        return ("if_idle", f"{node.name} is drained") if idle is not None and not busy else None
    if not ready:
        return ("drain", "nobody waits for it any more") if _unwanted(d, i, model) else None
    if idle is None or busy:
        return None
    return ("if_idle", "idle for longer than keep_alive") if _idle_too_long(d, i, model, idle) else None


def _unwanted(d: Draft, i: Instance, model: Model) -> bool:
    """A start that nobody waits for. A new leader gives gateways the time to repeat their demand first."""
    if d.state.waiting(model.key) or d.now - d.state.recovered_at < d.policy.demand_settle:
        return False
    if i.trigger == "replicas" and (demand := d.state.demand.get(model.key)) and demand.in_flight:
        return False
    return len(d.state.live(model)) > floor(d, model)


def _idle_too_long(d: Draft, i: Instance, model: Model, idle: float) -> bool:
    spec = model.card.spec
    if spec.pin or spec.keep_alive < 0 or d.state.waiting(model.key):
        return False
    if d.now - max(idle, i.ready_at or idle) < max(spec.keep_alive, d.policy.min_idle):
        return False
    ready = sum(1 for other in d.state.live(model) if other.state is InstanceState.READY)
    return ready > floor(d, model)


def floor(d: Draft, model: Model) -> int:
    """How many instances are kept up without demand."""
    return 0 if model.resting else model.card.spec.replicas.min


def send_claims(d: Draft) -> None:
    devices = {(i.node, device) for i in d.state.instances.values() if i.claim for device in i.device_ids}
    for node, device in sorted(devices):
        presence = d.state.presence.get(node)
        if presence is None or not presence.alive or presence.status is None:
            continue
        _give_up_hopeless_claims(d, node, device)
        for i in claims(d.state, node, device):
            booked = booking(d.state, node, device)
            if booked.held + i.reserve_bytes > booked.budget:
                break
            send_start(d, i)


def _give_up_hopeless_claims(d: Draft, node: str, device: str) -> None:
    """Claims whose victims will not leave after all (one was serving) end, the newest first, so that they are placed anew."""
    for i in reversed(claims(d.state, node, device)):
        if booking(d.state, node, device).coming >= 0:
            return
        leave(d, i, "drain", "its room is not coming free")


def wishes(d: Draft) -> list[Wish]:
    names = {*d.state.demand, *d.state.kept_up, *(w.model for w in d.state.waiters.values() if w.kind == "wake")}
    found = []
    for name in sorted(names | set(d.state.unmet)):
        model = d.state.models.get(name)
        wish = _wish(d, model) if model else None
        if wish is not None:
            found.append(wish)
        elif name in d.state.unmet:
            _no_longer(d, name)
    return sorted(found, key=lambda w: (-w.model.card.spec.priority, w.extra, w.since, w.model.key))


def _wish(d: Draft, model: Model) -> Wish | None:
    name = model.key
    live = len(d.state.live(model))
    demand = d.state.demand.get(name)
    unmet = d.state.unmet.get(name)
    if live == 0 and d.state.waiting(name):
        woken = [w.since for w in d.state.waiters.values() if w.kind == "wake" and w.model == name]
        trouble = d.state.trouble.get(name)
        trigger = "retry" if trouble and trouble.attempts else "demand" if demand and demand.waiting else "wake"
        since = min([*woken, *([demand.since] if demand and demand.since is not None else [])], default=d.now)
        heard = min([*woken, *([g.heard_at for g in demand.gateways if g.waiting] if demand else [])], default=d.now)
        return Wish(model, trigger, since, unmet.since if unmet else heard)
    if live < floor(d, model):
        return Wish(model, "min_replicas", d.now, unmet.since if unmet else d.now)
    return _more(d, model, live)


def _more(d: Draft, model: Model, live: int) -> Wish | None:
    """One more replica, if demand has exceeded for some time what the instances there can run at once."""
    name = model.key
    demand = d.state.demand.get(name)
    capacity = 0
    for i in d.state.live(model):
        seen = d.state.seen.get(i.instance_id)
        capacity += seen.status.capacity if seen and i.ready_at is not None else model.card.spec.max_concurrency
    wanted = demand.waiting + demand.in_flight if demand else 0
    if live == 0 or live >= model.card.spec.replicas.max or wanted <= capacity:
        d.drop(Pressure, name)
        return None
    pressure = d.state.pressure.get(name) or Pressure(name, d.now)
    d.put(pressure)
    if d.now - pressure.since <= d.policy.scale_up_after:
        return None
    return Wish(model, "replicas", pressure.since, d.now, extra=True)


def _no_longer(d: Draft, name: str) -> None:
    d.drop(Unmet, name)
    plan = d.state.last_plan_of(name)
    if plan is not None and plan.way == "wait" and plan.outcome == "pending":
        d.put(plan.model_copy(update={"outcome": "cancelled"}))


def _grant(d: Draft, wish: Wish) -> None:
    model = d.state.models[wish.model.key]
    placement = place(d, model, d.now - min(wish.since, wish.heard), extra=wish.extra, kept_up_only=wish.trigger == "min_replicas")
    if placement.chosen is not None:
        begin(d, model, placement, wish.trigger, wish.heard)
        d.drop(Unmet, model.key)
        send_claims(d)
    elif wish.extra:
        return
    elif placement.error is not None and wish.trigger != "min_replicas":
        plan = _note(d, wish, placement)
        failed = plan.model_copy(update={"outcome": "failed", "error": placement.error.body()})
        d.put(failed)
        give_up(d, model, placement.error.body(), plan.plan_id)
    else:
        d.put(Unmet(model.key, wish.heard, placement.reason))
        _note(d, wish, placement)
        if placement.error is not None and model.error != placement.error.message:
            d.put(replace(model, error=placement.error.message))


def _note(d: Draft, wish: Wish, placement: Placement) -> PlanRecord:
    """Keep the record of a decision that starts nothing: one for as long as the model waits, rewritten when the reason changes."""
    last = d.state.last_plan_of(wish.model.key)
    waiting = last if last is not None and last.outcome == "pending" and last.instance_id is None else None
    record = PlanRecord(
        plan_id=waiting.plan_id if waiting else f"plan-{d.token():x}",
        model=wish.model.key,
        created=waiting.created if waiting else d.now,
        trigger=wish.trigger,
        way=placement.way,
        candidates=placement.candidates,
        reason=placement.reason,
    )
    d.put(record)
    return record
