"""Engines of a model that was put to sleep, on nodes that the scheduler did not see meanwhile."""

from __future__ import annotations

from shared.contracts.admin import ModelAsleep
from shared.contracts.node import InstanceState
from tests.unit.scheduler.world import World


def test_engine_of_a_sleeping_model_is_stopped_when_its_node_returns(w: World) -> None:
    w.node()
    w.model("a", keep_alive=-1, replicas={"min": 1, "max": 1})
    w.up("a")
    w.tick(6, nodes_report=False)
    assert isinstance(w.answer(w.sleep("a")), ModelAsleep), "no instance is known"
    w.report()
    assert not w.of("a", InstanceState.READY)
    w.finish_stops()
    w.tick(5)
    assert not w.state.instances
    assert len(w.starts("a")) == 1


def test_sleep_holds_for_an_engine_whose_stop_was_lost_with_its_node(w: World) -> None:
    w.node()
    w.model("a", keep_alive=-1)
    w.up("a")
    w.undelivered = []
    waiter = w.sleep("a")
    w.tick(6, nodes_report=False)
    assert isinstance(w.answer(waiter), ModelAsleep)
    w.undelivered = None
    w.report()
    assert not w.of("a", InstanceState.READY)


def test_engine_that_returns_while_requests_wait_ends_the_sleep(w: World) -> None:
    w.node()
    w.model("a", keep_alive=-1)
    w.up("a")
    w.tick(6, nodes_report=False)
    w.sleep("a")
    w.demand("a")
    w.report()
    w.demand("a", waiting=0)
    w.tick(5)
    assert w.of("a", InstanceState.READY)
    assert len(w.starts("a")) == 1


def test_suspended_engine_of_a_sleeping_model_is_kept_when_its_node_returns(w: World) -> None:
    w.node()
    w.model("a", keep_alive=-1)
    w.can_suspend(w.up("a"))
    w.sleep("a")
    w.finish_stops()
    w.tick(6, nodes_report=False)
    w.report()
    w.tick(5)
    assert w.of("a", InstanceState.SUSPENDED)


def test_sleeping_model_that_serves_by_itself_is_suspended_again(w: World) -> None:
    """Its nodeagent was replaced, and resumes an engine whose snapshot is not known to be whole."""
    w.node()
    w.model("a", keep_alive=-1)
    running = w.up("a")
    w.can_suspend(running)
    w.sleep("a")
    w.finish_stops()
    running.state, running.suspending = InstanceState.READY, False
    w.report()
    w.finish_stops()
    assert w.of("a", InstanceState.SUSPENDED)


def test_request_of_a_parked_model_ends_its_sleep(w: World) -> None:
    w.node()
    w.model("a", keep_alive=-1, replicas={"min": 0, "max": 2})
    w.sleep("a")
    w.demand("a")
    w.get_ready()
    w.demand("a", waiting=0)
    w.tick(5)
    assert w.of("a", InstanceState.READY)
