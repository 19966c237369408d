"""The order in which models that want an instance are placed."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.domain.demand.replica_targets import ScaleUp, next_scale_up
from services.scheduler.domain.demand.slo import queue_alpha, slo_usage
from services.scheduler.domain.estimates.memory_needs import start_bytes
from services.scheduler.domain.placement.place import ask_of, place, starving
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Unschedulable

SAME_TIME_S = 1.0
"""Wishes that came within this are taken for simultaneous."""


AT_ONCE = 16
"""So many are weighed against each other."""


def scale_up_queue(tx: Transaction, names: Iterable[str]) -> list[ScaleUp]:
    """What the models of these names want, in the order in which it is granted: those that starve, the longest first, then as the profile says."""
    found: dict[str, ScaleUp] = {}
    for name in sorted(names):
        model = tx.state.models.get(name)
        wish = next_scale_up(tx, model) if model else None
        if wish is not None:
            found[name] = wish
        elif name in tx.state.unschedulable:
            _no_longer(tx, name)
    return _ordered(tx, found) if len(found) > 1 else list(found.values())


def _ordered(tx: Transaction, found: dict[str, ScaleUp]) -> list[ScaleUp]:
    starved = [w for w in found.values() if not w.is_extra and starving(tx, w.waited_s(tx.now))]
    first = sorted(starved, key=lambda w: (min(w.since, w.first_message_at), w.model.key))
    others = [w for w in found.values() if w not in first]
    asks = [ask_of(tx, w.model, start_bytes(tx.state, w.model.card), tx.now - w.since, extra=w.is_extra) for w in others]
    ordered = [a.model for a in tx.policy.profile.order(asks, slo_usage(tx), queue_alpha(tx))]
    # Whom a policy does not name is not forgotten.
    names = dict.fromkeys([*ordered, *(w.model.key for w in others)])
    return [*first, *_together(tx, [found[n] for n in names])]


def _together(tx: Transaction, ordered: list[ScaleUp]) -> list[ScaleUp]:
    """Of those that came at about the same time, those go first that lose most if another takes their best place: who is served first of them
    is chance, and what all of them wait together is not. Of more than `AT_ONCE` there is no room for most anyway."""
    if not 1 < len(ordered) <= AT_ONCE:
        return ordered
    result: list[ScaleUp] = []
    group: list[ScaleUp] = []
    for wish in ordered:
        if group and not _alike(group[0], wish):
            result += _by_regret(tx, group)
            group = []
        group.append(wish)
    return [*result, *_by_regret(tx, group)]


WEIGHED = 8
"""In a larger group nobody's loss is weighed against the others': each weighing is a decision of its own."""


def _alike(a: ScaleUp, b: ScaleUp) -> bool:
    same = a.model.card.spec.priority == b.model.card.spec.priority and a.is_extra == b.is_extra
    return same and abs(a.since - b.since) <= SAME_TIME_S


def _by_regret(tx: Transaction, group: list[ScaleUp]) -> list[ScaleUp]:
    if not 2 <= len(group) <= WEIGHED:
        return group
    return sorted(group, key=lambda w: -_regret(tx, w))


def _regret(tx: Transaction, wish: ScaleUp) -> float:
    """Milliseconds between its best place and the second best; as many as can be if it has but one, fewer than any if it has none."""
    placement = place(tx, wish.model, wish.waited_s(tx.now), extra=wish.is_extra, kept_up_only=wish.trigger == "min_replicas")
    if placement.chosen is None:
        return -1.0
    costs = sorted(c.predicted_ms + c.others_ms for c in placement.candidates if c.excluded is None and c.predicted_ms is not None)
    return costs[1] - costs[0] if len(costs) > 1 else float("inf")


def _no_longer(tx: Transaction, name: str) -> None:
    tx.drop(Unschedulable, name)
    plan = tx.state.last_plan_of(name)
    if plan is not None and plan.way == "wait" and plan.outcome == "pending":
        tx.put(plan.model_copy(update={"outcome": "cancelled"}))
