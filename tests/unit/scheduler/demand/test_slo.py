"""SLO counts in a running mesh, for policies that queue by SLO."""

from __future__ import annotations

from services.scheduler.domain.demand.slo import WINDOW_HOURS, queue_alpha, slo_usage
from services.scheduler.domain.effects import ReplyTo
from services.scheduler.domain.events import ObjectivesReported, RemoveModelRequested
from services.scheduler.domain.policies.port import Usage
from services.scheduler.domain.policies.torpor_queue import FIRST_ALPHA, PERIOD_S
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.views import view
from shared.contracts.base import Done
from shared.contracts.objectives import ObjectiveCounts, ReportObjectives
from simulator.policies import PROFILES
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World


def world(profile: str = "torpor") -> World:
    w = World(policy=Policy(profile=PROFILES[profile]))
    w.node("n", 4000 * MIB)
    w.model("a", slo={"ttft": 1.0, "percentile": 0.5})
    return w


def report(w: World, number: int, total: int, met: int, gateway: str = "g", model: str = "a") -> bool:
    """Apply a report of one gateway; return True if it is acknowledged."""
    counts = (ObjectiveCounts(model=model, total=total, met=met),)
    event = ObjectivesReported(w.now, ReportObjectives(gateway=gateway, number=number, counts=counts), "w")
    return any(e == ReplyTo("w", Done()) for e in w.send(event).effects)


def usage(w: World) -> Usage:
    return slo_usage(Transaction(w.state, w.now, w.policy))["a"]


def alpha(w: World) -> float:
    return queue_alpha(Transaction(w.state, w.now, w.policy))


def test_reports_of_all_gateways_add_up() -> None:
    w = world()
    assert report(w, 1, 5, 3)
    assert report(w, 2, 2, 2)
    assert report(w, 1, 1, 0, gateway="other")
    assert usage(w) == Usage("a", 8, 5, 0.5)


def test_repeated_report_counts_once_and_is_acknowledged_again() -> None:
    w = world()
    report(w, 1, 5, 3)
    assert report(w, 1, 5, 3)
    assert usage(w) == Usage("a", 5, 3, 0.5)


def test_requests_older_than_the_window_do_not_count() -> None:
    w = world()
    report(w, 1, 5, 0)
    w.now += (WINDOW_HOURS - 1) * 3600
    report(w, 2, 4, 4)
    assert usage(w) == Usage("a", 9, 4, 0.5)
    w.now += 3600
    assert usage(w) == Usage("a", 4, 4, 0.5), "read without a new report"
    report(w, 3, 1, 1)
    assert len(w.state.slo_counts["a"].hours) == 2, "and the old hour is forgotten"


def test_report_of_an_unknown_model_is_acknowledged_and_counts_nothing() -> None:
    w = world()
    assert report(w, 1, 5, 3, model="removed")
    assert not w.state.slo_counts


def test_counts_of_a_removed_model_are_forgotten() -> None:
    w = world()
    report(w, 1, 5, 3)
    w.admin(RemoveModelRequested(w.now, "r", "a"))
    assert not w.state.slo_counts


def test_alpha_adapts_once_per_period() -> None:
    w = world()
    report(w, 1, 4, 4)
    w.tick(1)
    report(w, 2, 9, 0)
    w.tick(1)
    assert alpha(w) == FIRST_ALPHA
    w.tick(PERIOD_S)
    assert alpha(w) == FIRST_ALPHA / 2, "no model complies any more"


def test_policy_without_slo_queue_orders_without_usage() -> None:
    w = world("lru")
    report(w, 1, 4, 4)
    w.tick(PERIOD_S)
    assert not slo_usage(Transaction(w.state, w.now, w.policy))


def test_cluster_view_shows_the_requests_that_are_missing() -> None:
    w = world()
    report(w, 1, 10, 4)
    (shown,) = view(w.state, "s", w.now, w.policy).models
    assert shown.objective is not None
    assert (shown.objective.total, shown.objective.met, shown.objective.required) == (10, 4, 2.0)
