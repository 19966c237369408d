"""The order in which models that want an instance are placed."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.domain.demand.replica_targets import Wish, wish_of
from services.scheduler.domain.demand.slo import alpha, book
from services.scheduler.domain.estimates.memory_needs import need_to_start
from services.scheduler.domain.placement.place import ask_of, place, starving
from services.scheduler.domain.state.transaction import Draft
from services.scheduler.domain.state.volatile import Unmet

SAME_TIME_S = 1.0
"""Wishes that came within this are taken for simultaneous."""


AT_ONCE = 16
"""So many are weighed against each other."""


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
    starved = [w for w in found.values() if not w.extra and starving(d, w.waited_s(d.now))]
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
    placement = place(d, wish.model, wish.waited_s(d.now), extra=wish.extra, kept_up_only=wish.trigger == "min_replicas")
    if placement.chosen is None:
        return -1.0
    costs = sorted(c.predicted_ms + c.others_ms for c in placement.candidates if c.excluded is None and c.predicted_ms is not None)
    return costs[1] - costs[0] if len(costs) > 1 else float("inf")


def _no_longer(d: Draft, name: str) -> None:
    d.drop(Unmet, name)
    plan = d.state.last_plan_of(name)
    if plan is not None and plan.way == "wait" and plan.outcome == "pending":
        d.put(plan.model_copy(update={"outcome": "cancelled"}))
