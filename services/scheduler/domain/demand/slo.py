"""Models against their objectives, for policies that queue by them (Torpor §5.2): how many requests were served, and how many of them in time.

What the scheduler can know of that: requests that an engine has completed, and those that waited for a start longer than `slo.ttft`. Heard
only: a new leader begins to count anew. Alpha of the queue adapts once in a period, for profiles that say so.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.scheduler.domain.policies.port import Usage
from services.scheduler.domain.policies.torpor_queue import FIRST_ALPHA, PERIOD_S, compliant_ratio, next_alpha
from services.scheduler.domain.state.entities import Instance, Model
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import InstanceReport, SloCounts, SloQueue
from services.scheduler.domain.values import replace
from shared.contracts.node import InstanceStatus

_NO_BOOK: Mapping[str, Usage] = {}


def count_completed(tx: Transaction, old: InstanceReport | None, s: InstanceStatus) -> None:
    """Requests that an instance has completed since its last report."""
    if not tx.policy.profile.slo_queue:
        return
    since = old.status.load.completed if old is not None else 0
    if (more := s.load.completed - since) > 0 and s.model in tx.state.models:
        known = tx.state.slo_counts.get(s.model) or SloCounts(s.model)
        tx.put(replace(known, total=known.total + more))


def count_late_requests(tx: Transaction, i: Instance, model: Model) -> None:
    """Those that waited for this start, if it came too late for them."""
    limit = model.card.spec.slo.ttft
    if not tx.policy.profile.slo_queue or limit is None or tx.now - i.requested_at <= limit:
        return
    demand = tx.state.demand.get(model.key)
    known = tx.state.slo_counts.get(model.key) or SloCounts(model.key)
    tx.put(replace(known, late=known.late + (demand.waiting if demand is not None else 0)))


def slo_usage(tx: Transaction) -> Mapping[str, Usage]:
    """What the profile's order is told."""
    if not tx.policy.profile.slo_queue:
        return _NO_BOOK
    found = {}
    for name, o in tx.state.slo_counts.items():
        model = tx.state.models.get(name)
        if model is not None and model.card.spec.slo.ttft is not None:
            total = max(o.total, o.late)
            found[name] = Usage(name, total, total - o.late, model.card.spec.slo.percentile)
    return found


def queue_alpha(tx: Transaction) -> float:
    known = tx.state.slo_queue.get("")
    return known.alpha if known is not None else FIRST_ALPHA


def adapt_alpha(tx: Transaction) -> None:
    """Once in a period: Torpor's Algorithm 2."""
    if not tx.policy.profile.slo_queue or not tx.state.slo_counts:
        return
    known = tx.state.slo_queue.get("")
    if known is not None and tx.now - known.since < PERIOD_S:
        return
    ratio = compliant_ratio(slo_usage(tx).values())
    if known is None:
        tx.put(SloQueue(FIRST_ALPHA, ratio, tx.now))
    else:
        tx.put(SloQueue(next_alpha(known.alpha, known.ratio, ratio), ratio, tx.now))
