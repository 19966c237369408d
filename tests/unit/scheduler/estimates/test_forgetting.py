"""Measurements of removed models and nodes are forgotten."""

from __future__ import annotations

from services.scheduler.domain.state.changes import Put, apply
from services.scheduler.domain.state.measurements import ANYWHERE
from services.scheduler.domain.state.migrations import MigrationTimes
from services.scheduler.domain.state.volatile import ConsolidationFailures
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World


def list_measured(w: World) -> set[tuple[str, str]]:
    return {(e.model, e.node) for e in w.state.estimates.values()}


def test_nothing_that_was_learned_of_a_removed_model_is_kept(w: World) -> None:
    w.node()
    for model in ("a", "b"):
        w.model(model)
        w.up(model)
    apply(w.state, [Put(MigrationTimes("a")), Put(ConsolidationFailures("a", attempts=3))])
    assert list_measured(w) == {(model, node) for model in ("a", "b") for node in ("n1", ANYWHERE)}
    w.remove("a")
    w.finish_stops()
    assert list_measured(w) == {("b", "n1"), ("b", ANYWHERE)}
    assert not w.state.migration_times
    assert not w.state.consolidation_failures
    assert set(w.state.measured_on) == {"b"}
    assert set(w.state.last_plan) == {"b"}
    assert {p.model for p in w.state.plans.values()} == {"b"}


def test_start_of_a_model_that_was_changed_meanwhile_measures_nothing(w: World) -> None:
    w.node()
    w.model("a", weights=400 * MIB)
    w.demand("a")
    w.undelivered = []  # the stop reaches the node after the start has ended
    w.model("a", weights=100 * MIB, max_model_len=64)
    w.get_ready("a")
    assert not list_measured(w)
    w.deliver()
    w.finish_stops()
    w.up("a")
    assert list_measured(w) == {("a", "n1"), ("a", ANYWHERE)}


def test_nothing_that_was_learned_on_a_removed_node_is_kept(w: World) -> None:
    w.node("n1")
    w.model("a")
    w.up("a")
    w.node("n2")
    w.tick(w.policy.node_lost_after_s + 1, nodes_report=False)
    w.report("n2")
    assert list_measured(w) == {("a", "n1"), ("a", ANYWHERE)}
    w.change_node("n1", "remove")
    assert list_measured(w) == {("a", ANYWHERE)}
    assert not w.state.measured_on
