"""Prefetch weights to nodes before their requests.

The probability that a model is requested within the horizon h follows from its usage history:

- recency: after u without use the odds are h : u (Gott's rule);
- frequency: at a mean interval m, 1 - exp(-h / m);
- period: with nearly constant intervals, whether the next arrival is due within h.

The highest of the three counts. A likely model without an instance and without weights in any
memory is prefetched

1. while no request waits and nothing is being started, so that requests keep links and memory;
2. to a node that may run it, has idle links, and has no prefetch under way;
3. into free memory, or memory whose content is less likely to be used;
4. otherwise, from a remote source, to a node's disk with room.

The loader drops a prefetch when a request waits there; it is chosen again afterwards. Useless
prefetches are cancelled. Each Tick examines a part of the models, so that its cost does not grow
with their number. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import exp, inf

from services.scheduler.domain.cost.formulas import reuse_odds
from services.scheduler.domain.effects import SendCancelPrefetch, SendPrefetch
from services.scheduler.domain.placement.constraints import placement_rule
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.prewarm.parking import requests_have_priority
from services.scheduler.domain.state.booking import Booking
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Model
from services.scheduler.domain.state.pulls import Tier
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.usage_history import Prefetch, UsageHistory
from services.scheduler.domain.state.volatile import LoaderPresence
from shared.contracts.loader import CancelPrefetch, PrefetchWeights

HORIZON_S = 120.0
LIKELY = 0.3
"""Models that are less likely to be used within the horizon are not prefetched."""
TWICE = 2
"""Arrivals before a history predicts anything."""
REGULAR = 0.2
"""Intervals that deviate by less than this share form a period."""
AT_A_TIME = 256
"""Models examined in one Tick."""
GIVEN_UP_AFTER_S = 600.0
AGAIN_S = 30.0
"""A prefetch without result (dropped or unreadable) is not repeated before this."""
BUSY_MS = 50.0
"""A link that is done within this is idle."""


def likelihood(usage: UsageHistory | None, now: float, horizon: float = HORIZON_S) -> float:
    """Return the probability of a request within `horizon` seconds."""
    if usage is None or usage.count < TWICE:
        return 0.0
    unused = max(0.0, now - usage.last_used_at)
    recency = reuse_odds(unused, horizon)
    # a long overdue model has another pattern now
    frequency = 1 - exp(-horizon / max(usage.mean_interval_s, unused / TWICE, 1e-3))
    return max(min(recency, frequency), _estimate_periodic(usage, now, horizon))


def _estimate_periodic(usage: UsageHistory, now: float, horizon: float) -> float:
    begin, end = _find_period(usage, horizon)
    return 0.9 if begin <= now <= end else 0.0


def _find_period(usage: UsageHistory, horizon: float) -> tuple[float, float]:
    """Return the times between which the next request of nearly constant intervals is due soon.

    Without such intervals there are none: the first time is infinite.
    """
    if usage.count <= TWICE or usage.deviation_s > REGULAR * usage.mean_interval_s:
        return inf, -inf
    due = usage.last_used_at + usage.mean_interval_s
    slack = max(2 * usage.deviation_s, 0.05 * usage.mean_interval_s)
    return due - horizon, due + slack


def start_prefetches(tx: Transaction) -> None:
    """Start the prefetches that may start now, and cancel useless ones."""
    _cancel_useless(tx)
    if not tx.policy.prefetch or not tx.state.usage_history or requests_have_priority(tx.state, tx.now, tx.policy):
        return
    busy = {p.node for p in tx.state.prefetches.values()}
    for name in _list_turn(tx):
        model = tx.state.models.get(name)
        if model is None or not _is_wanted(tx.state, model):
            continue
        chance = likelihood(tx.state.usage_history.get(name), tx.now)
        if chance < LIKELY:
            continue
        if (found := _place(tx, model, chance, busy)) is not None:
            _begin(tx, model, *found)
            busy.add(found[0])


def next_prefetch_at(state: ClusterState, now: float, policy: Policy) -> float:
    """Return the earliest time at which time alone may start a prefetch; infinite: never.

    A model that is not likely now becomes likely by time alone only if its next request is due.
    """
    if not policy.prefetch:
        return inf
    soonest = inf
    for name, usage in state.usage_history.items():
        model = state.models.get(name)
        if model is None or not _is_wanted(state, model):
            continue
        if likelihood(usage, now) >= LIKELY:
            return now
        begin, _ = _find_period(usage, HORIZON_S)
        if begin > now:
            soonest = min(soonest, begin)
    return soonest


def _list_turn(tx: Transaction) -> Iterable[str]:
    """Return the models of this turn; all take their turn within several Ticks."""
    turns = -(-len(tx.state.usage_history) // AT_A_TIME)
    turn = int(tx.now * 4) % turns
    return list(islice(tx.state.usage_history, turn * AT_A_TIME, (turn + 1) * AT_A_TIME))


def _is_wanted(state: ClusterState, model: Model) -> bool:
    """True if prefetching the model is useful anywhere."""
    card = model.card
    if card.spec.base is not None or card.spec.loads_itself or model.error is not None:
        return False
    if any(p.model == model.key and not p.is_over for p in state.pulls.values()):
        return False
    return not state.by_model.get(model.key) and not state.in_memory.get(card.info.revision) and model.key not in state.prefetches


def _place(tx: Transaction, model: Model, chance: float, busy: set[str]) -> tuple[str, Tier] | None:
    """Return (node, tier): the nearest source first, then the most free memory."""
    info = model.card.info
    on_disk = tx.state.on_disk.get(info.revision, ())
    remote = "://" in info.source and not on_disk
    excludes = placement_rule(tx.state, model)
    found: list[tuple[bool, bool, int, str, Tier]] = []
    for node, loader in tx.state.loaders.items():
        if node in busy or not _open(tx, node, loader):
            continue
        if excludes is not None and all(excludes(b) for b in _bookings(tx.state, node)):
            continue
        room = loader.status.dram_budget_bytes - loader.status.dram_bytes
        if _fits_without_evicting_likelier(tx, loader, info.weights_bytes, room, chance):
            found.append((False, node not in on_disk, -room, node, "dram"))
        elif remote and loader.status.ssd_budget_bytes - loader.status.ssd_bytes >= info.weights_bytes:
            found.append((True, False, -room, node, "ssd"))
    best = min(found, default=None)
    return (best[3], best[4]) if best is not None else None


def _open(tx: Transaction, node: str, loader: LoaderPresence) -> bool:
    """True if the node may load now: its loader is alive and idle."""
    known = tx.state.nodes.get(node)
    if known is None or known.cordoned or not tx.state.is_loader_alive(node, tx.now, tx.policy.node_lost_after_s):
        return False
    status = loader.status
    return not status.stopping and all((link.finish_ms or 0.0) <= BUSY_MS for link in status.links)


def _bookings(state: ClusterState, node: str) -> list[Booking]:
    return [b for device in state.nodes[node].devices if (b := state.bookings.get(f"{node}/{device.device_id}")) is not None]


def _fits_without_evicting_likelier(tx: Transaction, loader: LoaderPresence, nbytes: int, room: int, chance: float) -> bool:
    """True if the node's memory takes the weights without evicting likelier ones."""
    if nbytes > loader.status.dram_budget_bytes:
        return False
    if nbytes <= room:
        return True
    by_revision = {m.card.info.revision: m.key for m in tx.state.models.values()} if loader.status.cached else {}
    there = [c for c in loader.status.cached if c.tier == "dram"]
    likelier = [c for c in there if likelihood(tx.state.usage_history.get(by_revision.get(c.weights_id, "")), tx.now) >= chance]
    return bool(there) and not likelier and nbytes <= room + sum(c.nbytes for c in there)


def _begin(tx: Transaction, model: Model, node: str, tier: Tier) -> None:
    token = tx.next_token()
    tx.put(Prefetch(model.key, node, model.card.info.revision, tier, tx.now, token))
    tx.emit(SendPrefetch(node, PrefetchWeights(token=token, card=model.card, tier=tier)))


def _cancel_useless(tx: Transaction) -> None:
    """Remove finished prefetches, and cancel those of models that started elsewhere or are gone."""
    for p in list(tx.state.prefetches.values()):
        if _is_complete(tx.state, p) or tx.now - p.since > (AGAIN_S if _has_failed(tx.state, p) else GIVEN_UP_AFTER_S):
            tx.drop(Prefetch, p.key)
        elif p.model not in tx.state.models or any(i.node != p.node for i in tx.state.of_model(p.model)):
            tx.emit(SendCancelPrefetch(p.node, CancelPrefetch(weights_id=p.weights_id, token=p.token)))
            tx.drop(Prefetch, p.key)


def _is_complete(state: ClusterState, p: Prefetch) -> bool:
    """True if the node has the weights in the tier of the prefetch, or in a faster one."""
    return p.node in state.in_memory.get(p.weights_id, ()) or (p.tier == "ssd" and p.node in state.on_disk.get(p.weights_id, ()))


def _has_failed(state: ClusterState, p: Prefetch) -> bool:
    """True if the loader has reported since and is not loading the weights."""
    loader = state.loaders.get(p.node)
    if loader is None or loader.last_message_at <= p.since:
        return False
    return not any(s.weights_id == p.weights_id for s in loader.status.segments)
