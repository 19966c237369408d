"""What models want (one more instance, and why), and what becomes of the wish: a start, a claim, a wait or a refusal."""

from __future__ import annotations

from services.scheduler.domain.policies.port import Demand
from services.scheduler.domain.state.entities import Instance, Model
from services.scheduler.domain.state.transaction import Draft
from services.scheduler.domain.state.volatile import Pressure
from services.scheduler.domain.values import value


@value(frozen=True, slots=True)
class Wish:
    """One more instance that a model wants, and why. It has been waited for `since`, and known of here since `heard`."""

    model: Model
    trigger: str
    since: float
    heard: float
    extra: bool = False

    def waited_s(self, now: float) -> float:
        """Seconds since the model began to wait."""
        return now - min(self.since, self.heard)


def wish_of(d: Draft, model: Model) -> Wish | None:
    """The next instance that the model wants, if it wants one."""
    name = model.key
    running = d.state.live(model)
    live = len(running)
    demand = d.state.demand.get(name)
    unmet = d.state.unmet.get(name)
    if live == 0 and d.state.waiting(name):
        woken = [w.since for w in d.state.waiters.values() if w.kind == "wake" and w.model == name]
        trouble = d.state.trouble.get(name)
        trigger = "retry" if trouble and (trouble.attempts or trouble.killed) else "demand" if demand and demand.waiting else "wake"
        since = min([*woken, *([demand.since] if demand and demand.since is not None else [])], default=d.now)
        heard = min([*woken, *([g.heard_at for g in demand.gateways if g.waiting] if demand else [])], default=d.now)
        return Wish(model, trigger, since, unmet.since if unmet else heard)
    if live < model.floor:
        return Wish(model, "min_replicas", d.now, unmet.since if unmet else d.now)
    return _more(d, model, running)


def _more(d: Draft, model: Model, running: list[Instance]) -> Wish | None:
    """One more replica, if for some time the profile has wanted more than there are."""
    name = model.key
    if not running or len(running) >= model.card.spec.replicas.max:
        d.drop(Pressure, name)
        return None
    demand = d.state.demand.get(name)
    capacity = 0
    for i in running:
        seen = d.state.seen.get(i.instance_id)
        capacity += seen.status.capacity if seen and i.ready_at is not None else model.card.spec.max_concurrency
    asked = Demand(
        model=name,
        waiting=demand.waiting if demand else 0,
        running=demand.in_flight if demand else 0,
        live=len(running),
        capacity=max(1, capacity // len(running)),
        window=demand.window if demand else 0,
        minimum=model.floor,
        maximum=model.card.spec.replicas.max,
        peak=demand.peak if demand else 0,
    )
    if d.policy.profile.scale(asked) <= len(running):
        d.drop(Pressure, name)
        return None
    pressure = d.state.pressure.get(name) or Pressure(name, d.now)
    d.put(pressure)
    if d.now - pressure.since <= d.policy.scale_up_after:
        return None
    return Wish(model, "replicas", pressure.since, d.now, extra=True)
