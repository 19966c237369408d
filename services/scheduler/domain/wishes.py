"""What models want (one more instance, and why), and what becomes of the wish: a start, a claim, a wait or a refusal."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.domain.draft import Draft
from services.scheduler.domain.entities import Instance, Model
from services.scheduler.domain.failures import give_up
from services.scheduler.domain.heard import Pressure, Unmet
from services.scheduler.domain.lifecycle import begin
from services.scheduler.domain.needs import need_to_start
from services.scheduler.domain.objectives import alpha, book
from services.scheduler.domain.placement import Placement, ask_of, place, starving
from services.scheduler.domain.policies.port import Demand
from services.scheduler.domain.values import replace, value
from shared.contracts.plans import PlanRecord

SAME_TIME_S = 1.0
"""Wishes that came within this are taken for simultaneous."""
AT_ONCE = 16
"""So many are weighed against each other."""


@value(frozen=True, slots=True)
class Wish:
    """One more instance that a model wants, and why. It has been waited for `since`, and known of here since `heard`."""

    model: Model
    trigger: str
    since: float
    heard: float
    extra: bool = False


def wishes(d: Draft, names: Iterable[str]) -> list[Wish]:
    """What the models of these names want, in the order in which it is granted: those that starve, the longest first, then as the profile says."""
    found: dict[str, Wish] = {}
    for name in sorted(names):
        model = d.state.models.get(name)
        wish = wish_of(d, model) if model else None
        if wish is not None:
            found[name] = wish
        elif name in d.state.unmet:
            _no_longer(d, name)
    return _ordered(d, found) if len(found) > 1 else list(found.values())


def _ordered(d: Draft, found: dict[str, Wish]) -> list[Wish]:
    starved = [w for w in found.values() if not w.extra and starving(d, _waited(d, w))]
    first = sorted(starved, key=lambda w: (min(w.since, w.heard), w.model.key))
    others = [w for w in found.values() if w not in first]
    asks = [ask_of(d, w.model, need_to_start(d.state, w.model.card), d.now - w.since, extra=w.extra) for w in others]
    ordered = [a.model for a in d.policy.profile.order(asks, book(d), alpha(d))]
    # Whom a policy does not name is not forgotten.
    names = dict.fromkeys([*ordered, *(w.model.key for w in others)])
    return [*first, *_together(d, [found[n] for n in names])]


def _together(d: Draft, ordered: list[Wish]) -> list[Wish]:
    """Of those that came at about the same time, those go first that lose most if another takes their best place: who is served first of them
    is chance, and what all of them wait together is not. Of more than `AT_ONCE` there is no room for most anyway."""
    if not 1 < len(ordered) <= AT_ONCE:
        return ordered
    result: list[Wish] = []
    group: list[Wish] = []
    for wish in ordered:
        if group and not _alike(group[0], wish):
            result += _by_regret(d, group)
            group = []
        group.append(wish)
    return [*result, *_by_regret(d, group)]


WEIGHED = 8
"""In a larger group nobody's loss is weighed against the others': each weighing is a decision of its own."""


def _alike(a: Wish, b: Wish) -> bool:
    same = a.model.card.spec.priority == b.model.card.spec.priority and a.extra == b.extra
    return same and abs(a.since - b.since) <= SAME_TIME_S


def _by_regret(d: Draft, group: list[Wish]) -> list[Wish]:
    if not 2 <= len(group) <= WEIGHED:
        return group
    return sorted(group, key=lambda w: -_regret(d, w))


def _regret(d: Draft, wish: Wish) -> float:
    """Milliseconds between its best place and the second best; as many as can be if it has but one, fewer than any if it has none."""
    placement = place(d, wish.model, _waited(d, wish), extra=wish.extra, kept_up_only=wish.trigger == "min_replicas")
    if placement.chosen is None:
        return -1.0
    costs = sorted(c.predicted_ms + c.others_ms for c in placement.candidates if c.excluded is None and c.predicted_ms is not None)
    return costs[1] - costs[0] if len(costs) > 1 else float("inf")


def _waited(d: Draft, wish: Wish) -> float:
    return d.now - min(wish.since, wish.heard)


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


def _no_longer(d: Draft, name: str) -> None:
    d.drop(Unmet, name)
    plan = d.state.last_plan_of(name)
    if plan is not None and plan.way == "wait" and plan.outcome == "pending":
        d.put(plan.model_copy(update={"outcome": "cancelled"}))


def grant(d: Draft, wish: Wish) -> bool:
    """Start what is wished for, or keep on record why not. Whether something was begun (then there may be more to wish for)."""
    model = d.state.models[wish.model.key]
    placement = _placed(d, model, wish)
    if placement.chosen is not None:
        begin(d, model, placement, wish.trigger, wish.heard)
        d.drop(Unmet, model.key)
        return True
    if wish.extra:
        return False
    if placement.error is not None and wish.trigger != "min_replicas":
        plan = _note(d, wish, placement)
        failed = plan.model_copy(update={"outcome": "failed", "error": placement.error.body()})
        d.put(failed)
        give_up(d, model, placement.error.body(), plan.plan_id)
    else:
        d.put(Unmet(model.key, wish.heard, placement.reason))
        _note(d, wish, placement)
        if placement.error is not None and model.error != placement.error.message:
            d.put(replace(model, error=placement.error.message))
    return False


def _placed(d: Draft, model: Model, wish: Wish) -> Placement:
    """Another instance goes to a node that runs none of the model, if one has room: a hot model outlives its nodes, and shares their links."""
    waited, kept = _waited(d, wish), wish.trigger == "min_replicas"
    if d.state.live(model):
        alone = place(d, model, waited, extra=wish.extra, kept_up_only=kept, apart=True)
        if alone.chosen is not None:
            return alone
    return place(d, model, waited, extra=wish.extra, kept_up_only=kept)


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
