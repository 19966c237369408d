"""SLO counts in a running mesh, for policies that queue by SLO."""

from __future__ import annotations

from services.scheduler.domain.demand.slo import queue_alpha, slo_usage
from services.scheduler.domain.policies.torpor_queue import FIRST_ALPHA, PERIOD_S
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.transaction import Transaction
from simulator.policies import PROFILES
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World


def world(profile: str = "torpor") -> World:
    w = World(policy=Policy(profile=PROFILES[profile]))
    w.node("n", 4000 * MIB)
    w.model("a", slo={"ttft": 1.0, "percentile": 0.5})
    return w


def draft(w: World) -> Transaction:
    return Transaction(w.state, w.now, w.policy)


def test_late_requests_count_as_missed_objectives() -> None:
    w = world()
    w.demand("a", 2)
    w.now += 3.0
    w.get_ready("a")
    (running,) = w.of("a")
    running.completed = 5
    w.hear()
    usage = slo_usage(draft(w))["a"]
    assert (usage.total, usage.met, usage.percentile) == (5, 3, 0.5)


def test_alpha_adapts_once_per_period() -> None:
    w = world()
    w.up("a", served=4)
    w.tick(1)
    assert queue_alpha(draft(w)) == FIRST_ALPHA
    w.sleep("a")
    w.finish_stops()
    w.demand("a", 9)
    w.now += 5.0
    w.get_ready("a")
    w.tick(1)
    assert queue_alpha(draft(w)) == FIRST_ALPHA
    w.tick(PERIOD_S)
    assert queue_alpha(draft(w)) == FIRST_ALPHA / 2, "no model complies any more"


def test_policy_without_slo_queue_counts_nothing() -> None:
    w = world("lru")
    w.up("a", served=4)
    w.tick(1)
    assert not w.state.slo_counts
    assert not slo_usage(draft(w))
