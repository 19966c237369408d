"""Reconciliation: answers to operators, stopped instances, and new replicas."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.domain.events import WaiterCancelled
from shared.contracts.admin import ModelAsleep, ModelAwake
from shared.errors import CheckpointInvalid, EngineFailed
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World


def test_wake_is_answered_when_ready(w: World) -> None:
    w.node()
    w.model("a", aliases=("alias",))
    waiter = w.wake("alias")
    assert w.answer(waiter) is None
    w.now += 2
    w.get_ready()
    answer = w.answer(waiter)
    assert isinstance(answer, ModelAwake)
    assert answer.took_ms == pytest.approx(2000)


def test_wake_is_answered_with_the_failure(w: World) -> None:
    w.node()
    w.model("a")
    waiter = w.wake("a")
    w.fail("a", CheckpointInvalid("bad shard").body())
    assert w.answer(waiter).code == "checkpoint_invalid"


def test_cancelled_wake_cancels_its_start(w: World) -> None:
    w.node()
    w.model("a")
    waiter = w.wake("a")
    w.send(WaiterCancelled(w.now, waiter))
    assert len(w.stops("a")) == 1


def test_sleep_cancels_an_earlier_wake(w: World) -> None:
    """A sleep cancels the wake before it.

    The last order holds: earlier demand does not start the model again.
    """
    w.node()
    w.model("a")
    waiter = w.wake("a")
    w.sleep("a")
    refusal = w.answer(waiter)
    assert (refusal.code, "was put to sleep" in refusal.message) == ("conflict", True)
    w.finish_stops()
    w.tick(5)
    assert len(w.starts("a")) == 1
    assert w.state.waiting_count("a") == 0


def test_removal_of_a_model_answers_its_waiting_wakes(w: World) -> None:
    w.node()
    w.model("a")
    waiter = w.wake("a")
    w.remove("a")
    assert w.answer(waiter).code == "model_not_found"


def test_sleep_answers_with_the_bytes_freed(w: World) -> None:
    agent = w.node()
    w.model("a", replicas={"min": 1, "max": 1})
    w.get_ready()
    waiter = w.sleep("a")
    assert w.answer(waiter) is None
    agent.finish_stops()
    w.report()
    answer = w.answer(waiter)
    assert isinstance(answer, ModelAsleep)
    assert answer.freed_bytes == 324 * MIB
    w.tick(5)
    assert len(w.starts("a")) == 1, "replicas.min is not enforced until a request arrives"
    w.demand("a")
    assert len(w.starts("a")) == 2


def test_keep_alive_and_scale_to_zero(w: World) -> None:
    w.node()
    w.model("a", keep_alive=10)
    w.model("forever", keep_alive=-1)
    w.up("a")
    w.up("forever")
    w.tick(9)
    assert not w.stops("a")
    w.tick(2)
    assert len(w.stops("a")) == 1
    w.tick(10_000)
    assert not w.stops("forever")


def test_keep_alive_starts_at_the_last_request(w: World) -> None:
    w.node()
    w.model("a", keep_alive=10)
    a = w.up("a")
    w.tick(9)
    a.active = 1
    w.tick(5)
    a.active, a.completed, a.idle_since = 0, 2, w.now
    w.tick(9)
    assert not w.stops("a")
    w.tick(2)
    assert len(w.stops("a")) == 1


def test_min_replicas_are_kept_up(w: World) -> None:
    w.node()
    w.model("a", keep_alive=1, replicas={"min": 2, "max": 2})
    assert len(w.starts("a")) == 2
    w.get_ready()
    w.tick(100)
    assert not w.stops("a")
    w.fail("a", EngineFailed("gone").body())
    w.tick(100)
    assert len(w.starts("a")) == 4


def test_a_start_without_waiters_is_cancelled(w: World) -> None:
    w.node()
    w.model("a")
    w.demand("a", 1, gateway="g1")
    w.demand("a", 1, gateway="g2")
    w.demand("a", 0, gateway="g1")
    assert not w.stops("a")
    w.demand("a", 0, gateway="g2")
    assert len(w.stops("a")) == 1
    w.agents["n1"].finish_stops()
    w.report()
    assert w.state.last_plan_of("a").outcome == "cancelled"  # type: ignore[union-attr]


def test_demand_of_a_silent_gateway_expires(w: World) -> None:
    w.node()
    w.model("a")
    w.demand("a")
    w.tick(4)
    assert not w.stops("a")
    w.tick(2)
    assert len(w.stops("a")) == 1


def test_replicas_are_added_for_queued_requests_within_the_maximum(w: World) -> None:
    w.node()
    w.model("a", replicas={"min": 0, "max": 2}, max_concurrency=4)
    w.up("a").active = 4
    w.demand("a", 6, in_flight=4)
    assert len(w.starts("a")) == 1
    w.tick(1.1)
    w.demand("a", 6, in_flight=4)
    assert len(w.starts("a")) == 2
    w.get_ready()
    w.tick(2)
    w.demand("a", 20, in_flight=8)
    w.tick(2)
    assert len(w.starts("a")) == 2, "max is two"


@pytest.mark.parametrize(("arrivals", "instances"), [({}, 2), ({"window": 9}, 3), ({"window": 1, "peak": 14}, 4)])
def test_arrivals_of_the_last_window_are_expected_again(w: World, arrivals: dict[str, Any], instances: int) -> None:
    w.node(budget=4000 * MIB)
    w.model("a", replicas={"min": 0, "max": 8}, max_concurrency=8)
    w.up("a").active = 8
    for _ in range(2):
        w.demand("a", 4, in_flight=8, **arrivals)
        w.tick(1.1)
    assert len(w.starts("a")) == instances
