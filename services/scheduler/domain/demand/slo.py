"""Models against their objectives, for policies that queue by them (Torpor §5.2): how many requests were served, and how many of them in time.

What the scheduler can know of that: requests that an engine has completed, and those that waited for a start longer than `slo.ttft`. Heard
only: a new leader begins to count anew. Alpha of the queue adapts once in a period, for profiles that say so.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.scheduler.domain.policies.port import Usage
from services.scheduler.domain.policies.torpor_queue import FIRST_ALPHA, PERIOD_S, compliant_ratio, next_alpha
from services.scheduler.domain.state.entities import Instance, Model
from services.scheduler.domain.state.transaction import Draft
from services.scheduler.domain.state.volatile import Objective, Queueing, Seen
from services.scheduler.domain.values import replace
from shared.contracts.node import InstanceStatus

_NO_BOOK: Mapping[str, Usage] = {}


def count_completed(d: Draft, old: Seen | None, s: InstanceStatus) -> None:
    """Requests that an instance has completed since its last report."""
    if not d.policy.profile.slo_queue:
        return
    since = old.status.load.completed if old is not None else 0
    if (more := s.load.completed - since) > 0 and s.model in d.state.models:
        known = d.state.objectives.get(s.model) or Objective(s.model)
        d.put(replace(known, total=known.total + more))


def count_late(d: Draft, i: Instance, model: Model) -> None:
    """Those that waited for this start, if it came too late for them."""
    limit = model.card.spec.slo.ttft
    if not d.policy.profile.slo_queue or limit is None or d.now - i.requested_at <= limit:
        return
    demand = d.state.demand.get(model.key)
    known = d.state.objectives.get(model.key) or Objective(model.key)
    d.put(replace(known, late=known.late + (demand.waiting if demand is not None else 0)))


def book(d: Draft) -> Mapping[str, Usage]:
    """What the profile's order is told."""
    if not d.policy.profile.slo_queue:
        return _NO_BOOK
    found = {}
    for name, o in d.state.objectives.items():
        model = d.state.models.get(name)
        if model is not None and model.card.spec.slo.ttft is not None:
            total = max(o.total, o.late)
            found[name] = Usage(name, total, total - o.late, model.card.spec.slo.percentile)
    return found


def alpha(d: Draft) -> float:
    known = d.state.queueing.get("")
    return known.alpha if known is not None else FIRST_ALPHA


def adapt(d: Draft) -> None:
    """Once in a period: Torpor's Algorithm 2."""
    if not d.policy.profile.slo_queue or not d.state.objectives:
        return
    known = d.state.queueing.get("")
    if known is not None and d.now - known.since < PERIOD_S:
        return
    ratio = compliant_ratio(book(d).values())
    if known is None:
        d.put(Queueing(FIRST_ALPHA, ratio, d.now))
    else:
        d.put(Queueing(next_alpha(known.alpha, known.ratio, ratio), ratio, d.now))
