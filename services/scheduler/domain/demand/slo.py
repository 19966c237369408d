"""SLO compliance of each model, for policies that queue by it (Torpor §5.2).

Gateways report how many requests met their model's objective. Torpor counts from a function's
registration; here the last `WINDOW_HOURS` count, so that a long history of met requests does not
hide that a model misses its objective now. The counts are durable. Alpha of the queue adapts once
in a period, for profiles with `slo_queue`.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.scheduler.domain.effects import ReplyTo
from services.scheduler.domain.events import ObjectivesReported
from services.scheduler.domain.policies.port import Usage
from services.scheduler.domain.policies.torpor_queue import FIRST_ALPHA, PERIOD_S, compliant_ratio, next_alpha
from services.scheduler.domain.state.entities import Model
from services.scheduler.domain.state.measurements import AppliedReport, HourCounts, SloCounts
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import SloQueue
from shared.contracts.base import Done
from shared.contracts.objectives import REPORT_LOST_AFTER_S, ObjectiveCounts

WINDOW_HOURS = 24
_FORGET_GATEWAY_S = 2 * REPORT_LOST_AFTER_S
_NO_BOOK: Mapping[str, Usage] = {}


def apply_objectives(tx: Transaction, event: ObjectivesReported) -> None:
    """Count a gateway's report once, and acknowledge it when the counts are committed."""
    report = event.report
    for counts in report.counts:
        model = tx.state.serving_model(counts.model)
        if model is not None:
            known = tx.state.slo_counts.get(model.key) or SloCounts(model.key)
            tx.put(_add_counts(known, counts, AppliedReport(report.gateway, report.number, tx.now), tx.now))
    tx.emit(ReplyTo(event.waiter, Done()))


def _add_counts(known: SloCounts, counts: ObjectiveCounts, report: AppliedReport, now: float) -> SloCounts:
    if any(a.gateway == report.gateway and a.number >= report.number for a in known.applied):
        return known
    hour = int(now // 3600)
    same = next((h for h in known.hours if h.hour == hour), HourCounts(hour, 0, 0))
    added = HourCounts(hour, same.total + counts.total, same.met + min(counts.met, counts.total))
    hours = [h for h in known.hours if h.hour != hour and h.hour > hour - WINDOW_HOURS]
    others = [a for a in known.applied if a.gateway != report.gateway and now - a.at < _FORGET_GATEWAY_S]
    return SloCounts(known.model, (*hours, added), (*others, report))


def usage_of(counts: SloCounts, model: Model, now: float) -> Usage:
    """Return the requests of the last `WINDOW_HOURS`, and those that met the objective."""
    oldest = int(now // 3600) - WINDOW_HOURS
    recent = [h for h in counts.hours if h.hour > oldest]
    return Usage(counts.model, sum(h.total for h in recent), sum(h.met for h in recent), model.card.spec.slo.percentile)


def slo_usage(tx: Transaction) -> Mapping[str, Usage]:
    """Return the usage of models with an objective, for the profile's order."""
    if not tx.policy.profile.slo_queue:
        return _NO_BOOK
    found = {}
    for name, counts in tx.state.slo_counts.items():
        model = tx.state.models.get(name)
        if model is not None and model.card.spec.slo.is_set:
            found[name] = usage_of(counts, model, tx.now)
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
