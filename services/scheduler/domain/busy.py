"""Decide whether time alone may change a decision soon; if not, ticks may be rare.

A busy state has requests or operators that wait, something that starts, resumes, moves or is being
prefetched, or a deadline that is near. The others change by events only.
"""

from __future__ import annotations

from bisect import bisect_left
from math import isinf

from services.scheduler.domain.migration.consolidation import is_consolidation_due
from services.scheduler.domain.policies.torpor_queue import PERIOD_S
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.prewarm.prefetch import AT_A_TIME
from services.scheduler.domain.state.booking_index import DueTimes
from services.scheduler.domain.state.cluster import ClusterState


def is_busy(state: ClusterState, now: float, policy: Policy, within_s: float) -> bool:
    """True if time alone may change the state between `now` and `within_s` seconds later.

    1. Something is under way, or waits.
    2. The term has just begun: what waited before it is still being reported.
    3. An instance is due.
    4. A model is to be parked.
    5. A Tick examines only a part of the models that may be prefetched.
    6. The SLO queue is about to adapt.
    7. A pipeline group may be consolidated.

    Silent nodes are found by `is_node_lost_soon`.
    """
    under_way = (
        state.demand,
        state.waiters,
        state.unschedulable,
        state.overload,
        state.cooldowns,
        state.claimed,
        state.migrations,
        state.prefetches,
        [p for p in state.pulls.values() if not p.is_over],
    )
    if any(under_way):  # 1
        return True
    if now - state.recovered_at < max(policy.demand_grace_s, policy.recovery_window_s):  # 2
        return True
    return (
        _is_instance_due(state, now, policy, within_s)  # 3
        or any(not (known := state.park_failures.get(name)) or not known.final for name in state.to_park)  # 4
        or (policy.prefetch and len(state.usage_history) > AT_A_TIME)  # 5
        or _is_slo_queue_due(state, now, policy, within_s)  # 6
        or is_consolidation_due(state, now, policy, within_s)  # 7
    )


def _is_instance_due(state: ClusterState, now: float, policy: Policy, within_s: float) -> bool:
    """True if a timer of an instance ends soon, or has just ended.

    An instance that stays beyond its time is kept by `replicas.min`, not by the time.
    """
    order = state.deadlines.order if isinstance(state.deadlines, DueTimes) else sorted((d, i) for i, d in state.deadlines.items())
    at_once = bool(order) and isinf(order[0][0])
    next_due = bisect_left(order, (now - policy.min_idle_s - within_s, ""))
    return at_once or (next_due < len(order) and order[next_due][0] <= now + within_s)


def _is_slo_queue_due(state: ClusterState, now: float, policy: Policy, within_s: float) -> bool:
    if not policy.profile.slo_queue or not state.slo_counts:
        return False
    known = state.slo_queue.get("")
    return known is None or known.since + PERIOD_S <= now + within_s


def is_node_lost_soon(state: ClusterState, now: float, policy: Policy, within_s: float) -> bool:
    """True if a node, unless it reports, is lost within `within_s` seconds."""
    reported_before = now + within_s - policy.node_lost_after_s
    return any(p.alive and p.last_message_at <= reported_before for p in state.presence.values())
