"""SLO compliance of each model, for policies that queue by it (Torpor §5.2).

The scheduler counts requests that engines completed, and requests that waited for a start longer
than `slo.ttft`. The counts are volatile: a new leader starts at zero. Alpha of the queue adapts
once in a period, for profiles with `slo_queue`.
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
    """Count the requests that an instance has completed since its last report."""
    if not tx.policy.profile.slo_queue:
        return
    since = old.status.load.completed if old is not None else 0
    if (more := s.load.completed - since) > 0 and s.model in tx.state.models:
        known = tx.state.slo_counts.get(s.model) or SloCounts(s.model)
        tx.put(replace(known, total=known.total + more))


def count_late_requests(tx: Transaction, i: Instance, model: Model) -> None:
    """Count the requests that waited for this start longer than their objective."""
    limit = model.card.spec.slo.ttft
    if not tx.policy.profile.slo_queue or limit is None or tx.now - i.requested_at <= limit:
        return
    demand = tx.state.demand.get(model.key)
    known = tx.state.slo_counts.get(model.key) or SloCounts(model.key)
    tx.put(replace(known, late=known.late + (demand.waiting if demand is not None else 0)))


def slo_usage(tx: Transaction) -> Mapping[str, Usage]:
    """Return the usage of models with an objective, for the profile's order."""
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
    """Adapt alpha once in a period (Torpor, Algorithm 2)."""
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
