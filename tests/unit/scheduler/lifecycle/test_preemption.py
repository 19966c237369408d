"""Costs of a preemption: the time to clear memory, and the restarts that it causes."""

from __future__ import annotations

from typing import Any

import pytest

from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.plans import PlanRecord
from shared.errors import EngineFailed
from tests.support.fake_node import MIB
from tests.unit.scheduler.fake_agents import Running
from tests.unit.scheduler.world import World

ONE = 400 * MIB
"""Room for one instance of a model with 100 MiB of weights."""


def last_plan(w: World, model: str) -> PlanRecord:
    plan = w.state.last_plan_of(model)
    assert plan is not None
    return plan


def cleared_s(plan: PlanRecord) -> float | None:
    assert plan.chosen is not None
    return None if plan.chosen.cleared_ms is None else plan.chosen.cleared_ms / 1e3


def two(w: World, **options: Any) -> None:
    w.node(budget=ONE)
    w.model("a", **options)
    w.model("b", keep_alive=-1)


def preempt(w: World) -> PlanRecord:
    """Let a request for b wait for a busy instance of a, until it preempts that."""
    a = w.up("a")
    for _ in range(60):
        if w.stops("a"):
            break
        a.active = 1
        w.tick(1)
        w.demand("b")
    assert len(w.stops("a")) == 1
    a.active = 0
    return last_plan(w, "b")


def serve_b(w: World) -> None:
    """Serve b until it is idle and may be evicted."""
    w.get_ready("b")
    w.demand("b", 0)
    w.of("b", InstanceState.READY)[-1].completed = 1
    w.tick(w.policy.min_active_s + 1)


def restart(w: World) -> PlanRecord:
    """Let a request for a evict b, once that is idle, and wait for the start."""
    serve_b(w)
    w.demand("a")
    w.finish_stops()
    w.get_ready("a")
    return last_plan(w, "a")


def test_an_eviction_is_timed_and_causes_no_restart(w: World) -> None:
    two(w)
    w.up("a")
    w.tick(5)
    w.demand("b")
    assert cleared_s(last_plan(w, "b")) is None, "its memory is not free yet"
    w.tick(3)
    w.finish_stops()
    w.get_ready("b")
    plan = last_plan(w, "b")
    assert cleared_s(plan) == pytest.approx(3)
    assert plan.chosen is not None
    assert len(plan.chosen.victims) == 1
    assert last_plan(w, "a").preempted is None
    assert restart(w).caused_by is None


def test_a_start_with_room_clears_nothing(w: World) -> None:
    w.node(budget=2 * ONE)
    w.model("a")
    w.up("a")
    assert cleared_s(last_plan(w, "a")) is None


def test_the_wait_on_the_node_counts_as_clearing(w: World) -> None:
    """A start that is sent before its memory is free waits there."""
    two(w)
    w.up("a")
    w.tick(5)
    w.demand("b")
    w.tick(2)
    w.finish_stops()
    (b,) = w.of("b", InstanceState.LOADING)
    spans = ((Phase.RESERVE, -5000, 1000), (Phase.RESERVE, -3000, 1500), (Phase.RESERVE, -2500, 500), (Phase.LOAD, -1500, 1000))
    b.phases = tuple(PhaseSpan(phase=phase, start_ms=start, duration_ms=ms) for phase, start, ms in spans)
    w.now += 3
    w.get_ready("b")
    # 2 s until it was sent, 3 s before it was ready; the first span was before that.
    assert cleared_s(last_plan(w, "b")) == pytest.approx(3.5)


def test_a_preemption_causes_the_victims_next_start(w: World) -> None:
    two(w)
    cause = preempt(w)
    mark = last_plan(w, "a").preempted
    assert mark is not None
    assert (mark.plan_id, mark.at) == (cause.plan_id, w.now)
    w.demand("a")  # its requests wait now
    assert last_plan(w, "a").outcome == "pending"
    w.tick(2)
    w.finish_stops()
    restarted = restart(w)
    assert (restarted.outcome, restarted.caused_by) == ("ready", cause.plan_id)
    assert cleared_s(last_plan(w, "b")) == pytest.approx(2)
    w.finish_stops()
    assert last_plan(w, "a").preempted is None
    w.tick(10)
    w.demand("a", 0)
    w.demand("b")  # evicts a, which is idle
    w.finish_stops()
    assert restart(w).caused_by is None, "one start of it has succeeded"


@pytest.mark.parametrize(
    ("keep_alive", "wait_s", "is_caused"), [(60, 50, True), (60, 90, False), (-1, 200, True), (-1, 400, False)]
)
def test_a_later_start_would_have_been_cold_anyway(w: World, keep_alive: int, wait_s: int, is_caused: bool) -> None:
    two(w, keep_alive=keep_alive)
    preempt(w)
    w.demand("a", 0)
    w.finish_stops()
    w.get_ready("b")
    w.tick(wait_s)
    assert (restart(w).caused_by is not None) == is_caused


def test_an_operators_start_has_no_cause(w: World) -> None:
    two(w)
    preempt(w)
    w.finish_stops()
    serve_b(w)
    w.wake("a")
    w.finish_stops()
    plan = last_plan(w, "a")
    assert (plan.trigger, plan.caused_by) == ("wake", None)


def test_a_retry_has_the_cause_of_the_start_that_failed(w: World) -> None:
    two(w)
    cause = preempt(w)
    w.finish_stops()
    serve_b(w)
    w.demand("a")
    w.finish_stops()
    failed = last_plan(w, "a")
    w.fail("a", EngineFailed("no").body())
    again = last_plan(w, "a")
    assert (failed.caused_by, again.caused_by) == (cause.plan_id, cause.plan_id)
    assert again.plan_id != failed.plan_id
    assert again.trigger == "retry"


def test_a_model_with_another_instance_has_no_restart(w: World) -> None:
    w.node("n1", budget=ONE)
    w.node("n2", budget=ONE)
    w.model("a", replicas={"max": 2}, max_concurrency=1)
    w.model("b")
    w.up("a")

    def all_busy() -> list[Running]:
        running = w.of("a", InstanceState.READY)
        for r in running:
            r.active = 1
        return running

    for _ in range(30):
        all_busy()
        w.tick(1)
        w.demand("a", 3, in_flight=2)
        w.get_ready("a")
    assert len(all_busy()) == 2
    for _ in range(20):
        all_busy()
        w.tick(1)
        w.demand("a", 0, in_flight=2)
        w.demand("b")
    assert len(w.stops("a")) == 1
    assert last_plan(w, "a").preempted is None
