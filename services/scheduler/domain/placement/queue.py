"""The order in which models that need an instance are placed."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.domain.demand.replica_targets import ScaleUp, next_scale_up
from services.scheduler.domain.demand.slo import queue_alpha, slo_usage
from services.scheduler.domain.estimates.memory_needs import start_bytes
from services.scheduler.domain.placement.place import ask_of, is_starving, place
from services.scheduler.domain.policies.port import Ask
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Unschedulable
from services.scheduler.domain.values import replace

SAME_TIME_S = 1.0
"""Demand within this interval counts as simultaneous."""


AT_ONCE = 16
"""At most this many placements are ordered by regret."""

EXAMINED = 64
"""Most models that wait for room and that one decision places: half of this number are the first in
the queue, the other half take turns.
"""
_TURNS_PER_S = 4
"""One for each `Tick`."""


def scale_up_queue(tx: Transaction, names: Iterable[str]) -> list[ScaleUp]:
    """Return the needed instances of these models in the order in which they are placed.

    Starving models go first, those of the key that has received the least before others, then the
    longest-waiting; the rest follow the profile's order. Of many that wait for room, only some are
    returned: see `_limit_examined`.
    """
    found: dict[str, ScaleUp] = {}
    for name in sorted(names):
        model = tx.state.models.get(name)
        needed = next_scale_up(tx, model) if model else None
        if needed is not None:
            found[name] = needed
        elif name in tx.state.unschedulable:
            _clear_unschedulable(tx, name)
    return _limit_examined(tx, _order_scale_ups(tx, found)) if len(found) > 1 else list(found.values())


def _limit_examined(tx: Transaction, ordered: list[ScaleUp]) -> list[ScaleUp]:
    """Return the models to place now, of more than `EXAMINED` that wait for room.

    The first of the order keep their precedence. The others, which find no room before them unless
    they need less memory, take turns, so that a decision's cost does not grow with their number.
    """
    known = [w.model.key for w in ordered if w.model.key in tx.state.unschedulable]
    if len(known) <= EXAMINED:
        return ordered
    size = EXAMINED // 2
    later = known[size:]
    turn = int(tx.now * _TURNS_PER_S) % -(-len(later) // size)
    skipped = {*later[: turn * size], *later[(turn + 1) * size :]}
    return [w for w in ordered if w.model.key not in skipped]


def _order_scale_ups(tx: Transaction, found: dict[str, ScaleUp]) -> list[ScaleUp]:
    asks = _asks(tx, found)
    starved = {name for name, w in found.items() if not w.is_extra and is_starving(tx, w.waited_s(tx.now))}
    others = [a for name, a in asks.items() if name not in starved]
    ordered = [a.model for a in tx.policy.profile.order(others, slo_usage(tx), queue_alpha(tx))]
    # keep the models that a profile omits
    names = list(dict.fromkeys([*ordered, *(a.model for a in others)]))
    entitled = [n for n in names if _is_entitled(asks[n], [asks[s] for s in starved])]

    def by_share(w: ScaleUp) -> tuple[float, float, str]:
        return asks[w.model.key].share_s, min(w.since, w.first_message_at), w.model.key

    return [
        *_order_by_regret(tx, [found[n] for n in entitled], asks),
        *sorted((found[n] for n in starved), key=by_share),
        *_order_by_regret(tx, [found[n] for n in names if n not in entitled], asks),
    ]


def _asks(tx: Transaction, found: dict[str, ScaleUp]) -> dict[str, Ask]:
    """Return the asks by model.

    An instance that only `replicas.min` needs is charged to no key: it goes before none by a share.
    """
    asks = {
        name: ask_of(tx, w.model, start_bytes(tx.state, w.model.card), tx.now - w.since, extra=w.is_extra)
        for name, w in found.items()
    }
    greatest = max(a.share_s for a in asks.values())
    return {name: a if found[name].trigger != "min_replicas" else replace(a, share_s=greatest) for name, a in asks.items()}


def _is_entitled(ask: Ask, starved: list[Ask]) -> bool:
    """True if a model goes before the starving ones: its key has received less than theirs.

    Without this, a key with many models would keep all others waiting until they starve as well.
    """
    return bool(starved) and all(
        ask.share_s < s.share_s and ask.priority >= s.priority and ask.request_priority >= s.request_priority for s in starved
    )


def _order_by_regret(tx: Transaction, ordered: list[ScaleUp], asks: dict[str, Ask]) -> list[ScaleUp]:
    """Order simultaneous demand by regret: models that lose most if another takes their best place.

    Which of them arrived first is chance, and their total wait is not. Beyond `AT_ONCE` models,
    most find no room anyway.
    """
    if not 1 < len(ordered) <= AT_ONCE:
        return ordered
    result: list[ScaleUp] = []
    group: list[ScaleUp] = []
    for needed in ordered:
        if group and not _is_simultaneous(group[0], needed, asks):
            result += _by_regret(tx, group)
            group = []
        group.append(needed)
    return [*result, *_by_regret(tx, group)]


WEIGHED = 8
"""Larger groups are not ordered by regret: each comparison costs a placement decision."""


def _is_simultaneous(a: ScaleUp, b: ScaleUp, asks: dict[str, Ask]) -> bool:
    return _rank(asks[a.model.key]) == _rank(asks[b.model.key]) and abs(a.since - b.since) <= SAME_TIME_S


def _rank(ask: Ask) -> tuple[int, int, float, bool]:
    return ask.priority, ask.request_priority, ask.share_s, ask.is_extra


def _by_regret(tx: Transaction, group: list[ScaleUp]) -> list[ScaleUp]:
    if not 2 <= len(group) <= WEIGHED:
        return group
    return sorted(group, key=lambda w: -_regret(tx, w))


def _regret(tx: Transaction, needed: ScaleUp) -> float:
    """Return the milliseconds between the best place and the second best.

    Infinity with one place only, negative without any.
    """
    placement = place(
        tx, needed.model, needed.waited_s(tx.now), extra=needed.is_extra, min_replicas_only=needed.trigger == "min_replicas"
    )
    if placement.chosen is None:
        return -1.0
    costs = sorted(c.predicted_ms + c.others_ms for c in placement.candidates if c.excluded is None and c.predicted_ms is not None)
    return costs[1] - costs[0] if len(costs) > 1 else float("inf")


def _clear_unschedulable(tx: Transaction, name: str) -> None:
    tx.drop(Unschedulable, name)
    plan = tx.state.last_plan_of(name)
    if plan is not None and plan.way == "wait" and plan.outcome == "pending":
        tx.put(plan.model_copy(update={"outcome": "cancelled"}))
