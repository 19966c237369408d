"""Suspension instead of stopping, resumption instead of starting.

The nodes' measured costs decide.
"""

from __future__ import annotations

from typing import Any

from services.scheduler.domain.effects import SendResume, SendStop, SendSuspend
from services.scheduler.domain.state.accounting import booking_of
from shared.contracts.admin import ModelAsleep, ModelAwake
from shared.contracts.node import InstanceState, Suspension
from tests.support.fake_node import MIB
from tests.unit.scheduler.fake_agents import Running
from tests.unit.scheduler.world import World

READY, SUSPENDED, DRAINING = InstanceState.READY, InstanceState.SUSPENDED, InstanceState.DRAINING
# A model of 100 MiB of weights needs 324 MiB: two fit 700 MiB, three do not.
TWO = 700 * MIB
NEED = 324 * MIB


def asleep(w: World, model: str = "a", *, left: int = 0, resume_ms: float = 100.0, **options: Any) -> Running:
    """Create one suspended instance of a model."""
    w.model(model, **options)
    running = w.up(model)
    w.can_suspend(running, left=left, resume_ms=resume_ms)
    w.sleep(model)
    w.finish_stops()
    assert running.state is SUSPENDED
    return running


def test_sleep_suspends_and_reports_the_freed_bytes(w: World) -> None:
    w.node()
    w.model("a")
    w.can_suspend(w.up("a"))
    waiter = w.sleep("a")
    assert [e.command.only_if_idle for e in w.sent(SendSuspend)] == [False]
    assert not w.sent(SendStop)
    assert w.answer(waiter) is None
    w.finish_stops()
    answer = w.answer(waiter)
    assert isinstance(answer, ModelAsleep)
    assert answer.freed_bytes == 7


def test_sleep_during_a_resume_does_not_stop_the_instance(w: World) -> None:
    w.node()
    running = asleep(w)
    w.demand("a", 1)
    assert running.state is InstanceState.RESUMING
    w.report()
    w.demand("a", 0)
    before = len(w.sent(SendSuspend))
    w.sleep("a")
    assert len(w.sent(SendSuspend)) == before + 1
    assert not w.sent(SendStop)


def test_victim_that_its_node_has_not_assessed_is_suspended(w: World) -> None:
    """A victim that its node has not assessed yet is suspended.

    Two models take turns on a device that holds one: the instance just started makes room before
    its node knows whether it can be suspended.
    """
    w.node(budget=NEED + 100 * MIB)
    w.model("a")
    w.model("b")
    running = w.up("a")
    running.suspension = Suspension(assessed=False)
    w.report()
    w.demand("b", 1)
    assert [e.command.instance_id for e in w.sent(SendSuspend)] == [running.command.instance_id]
    assert not w.sent(SendStop)


def test_victim_that_starts_faster_than_it_resumes_is_stopped(w: World) -> None:
    """A victim that restarts faster than it resumes is stopped.

    An example is a builtin engine whose weights stay in host memory, where swap is slow.
    """
    w.node(budget=NEED + 100 * MIB)
    w.model("a")
    w.model("b")
    w.can_suspend(w.up("a"), resume_ms=60_000)
    w.demand("b", 1)
    assert w.sent(SendStop)
    assert not w.sent(SendSuspend)


def test_idle_instance_is_suspended_or_stopped_by_the_faster_way_back(w: World) -> None:
    w.node()
    for name, resume_ms in (("a", 100.0), ("b", 60_000.0)):
        w.model(name, keep_alive=0)
        w.can_suspend(w.up(name), resume_ms=resume_ms)
    w.tick(60)
    assert [e.command.instance_id for e in w.sent(SendSuspend)] == [w.of("a")[0].command.instance_id]
    assert [e.command.instance_id for e in w.sent(SendStop)] == [w.of("b")[0].command.instance_id]


def test_instance_that_cannot_be_suspended_is_stopped(w: World) -> None:
    w.node()
    w.model("a")
    w.up("a")
    w.sleep("a")
    assert w.sent(SendStop)
    assert not w.sent(SendSuspend)


def test_suspended_instance_books_only_its_remaining_bytes(w: World) -> None:
    w.node()
    asleep(w, left=24 * MIB)
    booked = booking_of(w.state, "n1", "cpu:0")
    assert (booked.held_bytes, booked.claimed_bytes) == (24 * MIB, 0)


def test_demand_resumes_a_suspended_instance_instead_of_starting_one(w: World) -> None:
    w.node()
    running = asleep(w)
    w.demand("a")
    assert len(w.sent(SendResume)) == 1
    assert len(w.starts("a")) == 1, "the first start, and no other"
    assert running.state is InstanceState.RESUMING
    plan = w.state.last_plan_of("a")
    assert plan is not None
    assert plan.way == "restore"
    assert plan.chosen is not None
    assert plan.chosen.predicted["restore"] == 100.0
    w.get_ready("a")
    plan = w.state.last_plan_of("a")
    assert plan is not None
    assert plan.outcome == "ready"
    assert [i.state for i in w.state.of_model("a")] == [READY]


def test_restore_does_not_change_the_start_estimates(w: World) -> None:
    w.node()
    asleep(w)
    before = dict(w.state.estimates)
    w.demand("a")
    w.get_ready("a")
    assert dict(w.state.estimates) == before


def test_wake_is_answered_when_the_instance_has_resumed(w: World) -> None:
    w.node()
    asleep(w)
    waiter = w.wake("a")
    assert w.answer(waiter) is None
    w.get_ready("a")
    assert isinstance(w.answer(waiter), ModelAwake)


def test_idle_instance_is_suspended_after_its_keep_alive(w: World) -> None:
    w.node()
    w.model("a", keep_alive=10)
    running = w.up("a")
    w.can_suspend(running)
    w.tick(11)
    assert [e.command.only_if_idle for e in w.sent(SendSuspend)] == [True]
    w.finish_stops()
    for _ in range(3):
        w.tick(11)
    assert running.state is SUSPENDED, "and stays so"


def test_two_models_alternate_on_a_device_with_room_for_one(w: World) -> None:
    w.node(budget=400 * MIB)
    first = asleep(w, "a", keep_alive=-1)
    second = asleep(w, "b", keep_alive=-1)
    for model, up, down in (("a", first, second), ("b", second, first), ("a", first, second)):
        w.demand(model)
        w.finish_stops()
        w.get_ready(model)
        w.demand(model, 0)
        assert up.state is READY
        assert down.state is SUSPENDED
        up.completed += 1
        w.tick(3)
    assert len(w.starts("a")) == len(w.starts("b")) == 1
    plan = w.state.last_plan_of("a")
    assert plan is not None
    assert plan.way == "evict_then_restore"


def test_victim_that_would_free_too_little_is_stopped(w: World) -> None:
    w.node(budget=400 * MIB)
    w.model("a")
    w.model("b")
    w.can_suspend(w.up("a"), left=100 * MIB)
    w.tick(3)
    w.demand("b")
    assert not w.sent(SendSuspend)
    assert w.sent(SendStop)


def test_remaining_bytes_of_a_suspended_instance_can_be_reclaimed(w: World) -> None:
    w.node(budget=400 * MIB)
    asleep(w, "a", left=100 * MIB)
    w.model("b")
    w.demand("b")
    stops = w.sent(SendStop)
    assert len(stops) == 1, "it falls to stopped"
    w.finish_stops()
    w.get_ready("b")
    assert w.of("b", READY)


def test_a_resume_without_room_waits_until_idle_instances_are_evicted(w: World) -> None:
    w.node(budget=TWO)
    running = asleep(w, "a")
    w.model("b")
    w.model("c")
    w.up("b")
    w.tick(3)
    w.up("c")
    w.tick(3)
    w.demand("a")
    assert running.state is SUSPENDED
    assert w.stops("b"), "the longest idle leaves"
    w.finish_stops()
    assert running.state is InstanceState.RESUMING
    w.get_ready("a")
    assert running.state is READY


def test_a_waiting_resume_without_demand_stays_suspended(w: World) -> None:
    w.node(budget=400 * MIB)
    running = asleep(w, "a")
    w.model("b")
    w.up("b")
    w.tick(3)
    w.demand("a")
    w.demand("a", 0)
    w.tick(5)
    w.finish_stops()
    assert running.state is SUSPENDED
    assert [i.state for i in w.state.of_model("a")] == [SUSPENDED]
    assert not w.sent(SendResume)


def test_fast_start_elsewhere_is_preferred_over_a_slow_restore(w: World) -> None:
    w.node("n1")
    asleep(w, "a", resume_ms=60_000.0)
    w.node("n2")
    w.demand("a")
    assert not w.sent(SendResume)
    assert len(w.starts("a")) == 2


def test_missing_suspended_instance_is_replaced_by_a_cold_start(w: World) -> None:
    w.node()
    running = asleep(w)
    running.state = InstanceState.STOPPED
    w.demand("a")
    assert len(w.starts("a")) == 2


def test_death_of_a_suspended_instance_is_not_a_model_failure(w: World) -> None:
    w.node()
    running = asleep(w)
    running.state = InstanceState.FAILED
    w.report()
    assert w.state.of_model("a") == []
    assert w.state.models["a"].error is None
    assert "a" not in w.state.failures


def test_suspended_instance_of_a_removed_model_is_stopped(w: World) -> None:
    w.node()
    running = asleep(w)
    w.remove("a")
    assert w.sent(SendStop)
    w.finish_stops()
    assert running.state is InstanceState.STOPPED
    assert w.state.of_model("a") == []


def test_new_leader_adopts_suspended_instances(w: World) -> None:
    w.node()
    running = asleep(w)
    for i in list(w.state.instances):
        del w.state.instances[i]
    w.state.by_model.clear()
    w.state.by_node.clear()
    w.state.by_device.clear()
    w.report()
    assert [i.state for i in w.state.of_model("a")] == [SUSPENDED]
    w.demand("a")
    assert running.state is InstanceState.RESUMING


def test_demand_resumes_a_suspended_instance_of_replicas_min(w: World) -> None:
    w.node()
    w.model("a", replicas={"min": 1, "max": 1})
    w.get_ready("a")
    running = w.of("a", READY)[0]
    w.can_suspend(running)
    w.sleep("a")
    w.finish_stops()
    w.tick(3)
    assert running.state is SUSPENDED, "put to sleep by an operator"
    w.demand("a")
    assert running.state is InstanceState.RESUMING
