"""Decisions under assumptions do not change the cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.domain.what_if import WhatIfResult, evaluate_what_if, queue_position
from shared.contracts.admin import AssumeBudget, AssumeNode, AssumeNoNode, Assumption
from shared.errors import Conflict, NotFound
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World

ONE = 400 * MIB
"""Room for one model of 324 MiB."""


def full() -> World:
    """Create one device, taken by a pinned model; two others wait."""
    w = World()
    w.node("n1", ONE)
    w.model("pinned", pin=True)
    w.up("pinned")
    for name, priority in (("low", 0), ("high", 5)):
        w.model(name, priority=priority)
        w.demand(name)
        w.tick(0.25)
    return w


def ask(w: World, model: str, *assumptions: Assumption) -> WhatIfResult:
    before, count = w.state.fork(), len(w.effects)
    found = evaluate_what_if(w.state, w.state.models[model], assumptions, w.now, w.policy)
    assert (w.state, len(w.effects)) == (before, count), "nothing is done"
    return found


def test_assumed_node_serves_the_first_request_in_the_queue() -> None:
    w = full()
    found = ask(w, "high", AssumeNode(node="n2"))
    assert found.plan.chosen is not None
    assert found.plan.chosen.node == "n2"
    assert found.assumed == ("node n2 is there, with 1 x cpu of 400 MiB, empty",)


def test_assumed_node_is_taken_by_the_request_ahead_in_the_queue() -> None:
    w = full()
    found = ask(w, "low", AssumeNode(node="n2"))
    assert (found.plan.way, [p.model for p in found.others]) == ("wait", ["high"])
    found = ask(w, "low", AssumeNode(node="n2", devices=2, nbytes=ONE))
    assert found.plan.chosen is not None


def test_assumed_larger_budget_makes_room() -> None:
    w = full()
    found = ask(w, "high", AssumeBudget(node="n1", device="cpu:0", nbytes=2 * ONE))
    assert found.plan.chosen is not None
    assert found.plan.chosen.node == "n1"


def test_assumed_missing_node_is_not_a_candidate() -> None:
    w = World()
    w.node("n1", ONE)
    w.node("n2", ONE)
    w.model("a")
    assert ask(w, "a").plan.chosen is not None, "without demand, one request is assumed"
    assert [c.node for c in ask(w, "a", AssumeNoNode(node="n1")).plan.candidates] == ["n2"]
    assert ask(w, "a", AssumeNoNode(node="n1"), AssumeNoNode(node="n2")).plan.chosen is None


def test_what_if_for_a_running_model_places_one_more_instance() -> None:
    w = World()
    w.node("n1", ONE)
    w.model("a")
    w.up("a")
    found = ask(w, "a", AssumeNode(node="n2"))
    assert found.runs_already
    assert found.plan.reason.startswith("it already runs (")
    assert found.plan.chosen is not None
    assert found.plan.chosen.node == "n2"


def test_assumption_that_contradicts_the_cluster_is_refused() -> None:
    w = full()
    for assumption, error in (
        (AssumeNode(node="n1"), Conflict),
        (AssumeNoNode(node="n9"), NotFound),
        (AssumeBudget(node="n1", device="cuda:7", nbytes=1), NotFound),
    ):
        with pytest.raises(error):
            ask(w, "low", assumption)
    empty = World()
    empty.model("a")
    with pytest.raises(NotFound, match="DEVICES:BYTES"):
        ask(empty, "a", AssumeNode(node="n1"))


def test_queue_position_names_the_models_ahead() -> None:
    w = full()
    low = queue_position(w.state, w.state.models["low"], w.now)
    assert low is not None
    assert (low.position, low.length, low.before, low.waiting) == (2, 2, ("high",), 1)
    assert queue_position(w.state, w.state.models["pinned"], w.now) is None


changes = st.one_of(
    st.builds(AssumeNode, node=st.sampled_from(("n2", "n3")), devices=st.none() | st.integers(1, 4)),
    st.builds(AssumeBudget, node=st.just("n1"), device=st.just("cpu:0"), nbytes=st.integers(0, 4 * ONE)),
)


@given(st.lists(changes, max_size=2, unique_by=lambda a: a.node), st.sampled_from(("low", "high", "pinned")))
def test_assumptions_do_not_change_the_state(assumptions: list[Assumption], model: str) -> None:
    ask(full(), model, *assumptions)
