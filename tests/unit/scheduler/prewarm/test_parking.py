"""Parked models: time, place and order; requests have priority."""

from __future__ import annotations

from typing import Any

from services.scheduler.domain.effects import SendResume, SendStop, SendSuspend
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.prewarm.parking import park_view
from shared.contracts.admin import ParkView
from shared.contracts.node import Capability, InstanceState, Suspension
from shared.errors import EngineFailed
from tests.support.fake_node import MIB
from tests.unit.scheduler.fake_agents import Agent
from tests.unit.scheduler.world import World

READY, SUSPENDED, LOADING = InstanceState.READY, InstanceState.SUSPENDED, InstanceState.LOADING
# A model of 100 MiB of weights needs 324 MiB: two fit 700 MiB, three do not.
TWO = 700 * MIB
ABLE = Capability(name="suspend:cpu", available=True)


def able(w: World, budget: int = 1000 * MIB, name: str = "n1", **more: Any) -> Agent:
    """Create a node that can suspend."""
    agent = w.node(name, budget)
    agent.capabilities, agent.snapshot_budget = (ABLE,), 10_000 * MIB
    for key, value in more.items():
        setattr(agent, key, value)
    w.report()
    return agent


def warm(w: World, *models: str, reason: str = "") -> None:
    """Let the starts of these models succeed; their node assesses suspension."""
    for agent in w.agents.values():
        for r in agent.instances.values():
            if r.state is LOADING and (not models or r.command.card.name in models):
                need = r.command.reserve_bytes
                r.suspension = Suspension(possible=not reason, reason=reason, way="cpu", need_bytes=need, snapshot_bytes=need // 2)
    w.get_ready(*models)


def park(w: World, *models: str) -> None:
    warm(w, *models)
    w.finish_stops()
    w.tick(1)


def seen(w: World, model: str) -> ParkView:
    found = park_view(w.state, w.state.models[model], w.now, w.policy)
    assert found is not None
    return found


def test_parked_model_is_started_suspended_and_resumed_by_its_first_request(w: World) -> None:
    able(w)
    w.model("a", park=True)
    w.tick(1)
    assert seen(w, "a").state == "starting"
    assert [e.command.card.name for e in w.starts("a")] == ["a"]
    warm(w)
    assert [e.command.only_if_idle for e in w.sent(SendSuspend)] == [True]
    assert seen(w, "a").state == "suspending"
    w.finish_stops()
    assert seen(w, "a").state == "parked"
    for _ in range(5):
        w.tick(60)
    assert len(w.starts("a")) == 1, "and stays so"
    w.demand("a")
    assert len(w.sent(SendResume)) == 1
    w.get_ready()
    assert seen(w, "a").state == "up"


def test_models_without_park_are_not_started(w: World) -> None:
    able(w)
    w.model("a")
    w.tick(60)
    assert not w.starts("a")
    assert park_view(w.state, w.state.models["a"], w.now, w.policy) is None


def test_priority_then_the_smallest_first_two_at_a_time(w: World) -> None:
    able(w, 4000 * MIB)
    w.agents["n1"].capabilities = ()
    w.report()
    for name, weights, priority in (("big", 300, 0), ("small", 50, 0), ("first", 200, 5), ("middle", 100, 0)):
        w.model(name, weights * MIB, park=True, priority=priority)
    w.agents["n1"].capabilities = (ABLE,)
    order = []
    for _ in range(6):
        w.tick(1)
        now = [r.command.card.name for r in w.agents["n1"].instances.values() if r.state is LOADING]
        assert len(now) <= 2
        order += [n for n in now if n not in order]
        park(w, *now[:1])
    assert order == ["first", "small", "middle", "big"]


def test_model_without_room_waits_and_smaller_models_are_parked_first(w: World) -> None:
    able(w, TWO)
    w.model("here")
    w.up("here")
    w.model("big", 300 * MIB, park=True)
    w.model("small", 100 * MIB, park=True)
    w.tick(5)
    assert [r.command.card.name for r in w.of("small")] == ["small"]
    park(w)
    assert seen(w, "small").state == "parked"
    assert seen(w, "big").state == "waiting"
    assert "n1/cpu:0: needs" in seen(w, "big").reason
    assert not w.sent(SendStop), "no instance is evicted for it"


def test_requests_have_priority_over_parking(w: World) -> None:
    able(w)
    w.model("real")
    w.demand("real")
    w.model("a", park=True)
    w.tick(1)
    assert not w.starts("a")
    assert seen(w, "a") == ParkView(state="queued", reason="requests have priority")
    w.get_ready("real")
    w.demand("real", 0)
    w.tick(1)
    assert w.starts("a")


def test_parking_start_is_stopped_for_a_request_and_retried(w: World) -> None:
    able(w, 400 * MIB)
    w.model("a", park=True)
    w.model("real")
    w.tick(1)
    assert w.of("a", LOADING)
    w.demand("real")
    assert len(w.stops("a")) == 1, "at once, though it is not idle but starting"
    w.finish_stops()
    w.get_ready("real")
    w.demand("real", 0)
    assert w.of("real", READY)
    w.tick(1)
    assert seen(w, "a").state == "waiting"
    assert not w.state.park_failures, "it was not its fault"
    w.remove("real")
    w.finish_stops()
    w.tick(1)
    assert len(w.starts("a")) == 2


def test_request_takes_over_a_parking_start(w: World) -> None:
    able(w, keep_alive=300)
    w.model("a", park=True)
    w.tick(1)
    w.demand("a")
    warm(w)
    w.demand("a", 0)
    for _ in range(5):
        w.tick(3)
    assert len(w.starts("a")) == 1
    assert not w.sent(SendSuspend), "it serves, and stays for its keep_alive"
    w.tick(400)
    assert w.sent(SendSuspend)


def test_parking_starts_nothing_on_a_node_that_cannot_suspend(w: World) -> None:
    able(w, capabilities=(Capability(name="suspend:cpu", available=False, reason="there is no swap"),))
    w.model("a", park=True)
    w.tick(5)
    assert not w.starts("a")
    assert seen(w, "a") == ParkView(state="impossible", reason="n1/cpu:0: it cannot suspend: there is no swap")
    w.agents["n1"].capabilities = (ABLE,)
    w.tick(1)
    assert w.starts("a"), "swap was set up meanwhile"


def test_parking_is_impossible_if_suspension_is_off(w: World) -> None:
    able(w, capabilities=())
    w.model("a", park=True)
    w.tick(5)
    assert not w.starts("a")
    assert "THAW_SUSPEND" in seen(w, "a").reason


def test_parked_instance_that_saves_no_time_is_stopped_with_a_reason(w: World) -> None:
    able(w)
    w.model("a", park=True)
    w.tick(1)
    warm(w, reason="it resumes no sooner (2.00 s) than it starts cold (1.00 s)")
    w.tick(1)
    assert not w.sent(SendStop), "its node may not have looked yet"
    w.tick(30)
    w.finish_stops()
    w.tick(600)
    assert len(w.starts("a")) == 1
    assert seen(w, "a").state == "impossible"
    assert "no sooner" in seen(w, "a").reason


def test_failures_are_tried_again_three_times_in_all(w: World) -> None:
    able(w)
    w.model("a", park=True)
    for _ in range(6):
        w.tick(40)
        w.fail("a", EngineFailed("it would not").body())
    w.tick(40)
    assert len(w.starts("a")) == 3
    assert seen(w, "a") == ParkView(state="failed", reason="it would not")
    w.model("a", park=True, max_concurrency=3)
    w.tick(1)
    assert len(w.starts("a")) == 4, "its change is a new beginning"


def test_request_starts_a_model_whose_parking_failed(w: World) -> None:
    able(w)
    w.model("a", park=True)
    for _ in range(6):
        w.tick(40)
        w.fail("a", EngineFailed("it would not").body())
    w.demand("a")
    assert len(w.starts("a")) == 4


def test_failed_suspension_counts_as_a_parking_failure(w: World) -> None:
    able(w)
    w.model("a", park=True)
    for _ in range(6):
        w.tick(40)
        warm(w)
        for r in w.of("a"):
            r.suspending = False  # its node gives up, and stops it
        w.finish_stops()
    assert len(w.starts("a")) == 3
    assert seen(w, "a").state == "failed"


def test_room_for_snapshots_is_counted(w: World) -> None:
    able(w, snapshot_budget=400 * MIB)
    w.model("a", park=True)
    w.model("b", park=True)
    w.tick(1)
    park(w)
    w.tick(1)
    assert seen(w, "a").state == "parked"
    assert not w.starts("b"), "what is parked first would be dropped for it"
    assert "THAW_SNAPSHOT_BYTES" in seen(w, "b").reason


def test_models_are_parked_again_on_a_node_that_restarted_empty(w: World) -> None:
    agent = able(w)
    w.model("a", park=True)
    w.tick(1)
    park(w)
    agent.instances.clear()
    agent.boot, agent.seq = "boot-2", 5
    for _ in range(3):
        w.tick(3)
    assert len(w.starts("a")) == 2


def test_model_that_dies_while_parked_is_parked_again_a_limited_number_of_times(w: World) -> None:
    able(w)
    w.model("a", park=True)
    for _ in range(6):
        w.tick(40)
        park(w)
        for r in w.of("a", SUSPENDED):
            r.state = InstanceState.FAILED
        w.report()
    assert len(w.starts("a")) == 3


def test_new_leader_parks_only_after_the_demand_grace_period() -> None:
    w = World(policy=Policy(demand_grace_s=3.0))
    able(w)
    w.state.recovered_at = w.now
    w.model("a", park=True)
    w.tick(1)
    assert not w.starts("a")
    w.tick(3)
    assert w.starts("a")


def test_a_model_put_to_sleep_stays_asleep(w: World) -> None:
    able(w)
    w.model("a", park=True, replicas={"min": 1, "max": 1})
    warm(w)
    w.sleep("a")
    w.finish_stops()
    w.of("a", SUSPENDED)[0].state = InstanceState.FAILED
    for _ in range(4):
        w.tick(5)
        park(w)
    assert len(w.starts("a")) == 2
    assert not w.of("a", READY), "parked again, and not brought up"
    assert seen(w, "a").state == "parked"


def test_unsatisfiable_replicas_min_does_not_block_parking_of_other_models(w: World) -> None:
    able(w, 400 * MIB)
    w.model("pinned", 10 * MIB, pin=True)
    w.up("pinned")
    w.model("kept", 100 * MIB, replicas={"min": 1, "max": 1})
    w.tick(1)
    assert "kept" in w.state.unschedulable
    w.model("a", 1 * MIB, park=True, engine_args={"kv_cache_bytes": MIB}, memory=20 * MIB)
    w.tick(1)
    assert w.starts("a")


def test_park_concurrency_zero_disables_parking() -> None:
    w = World(policy=Policy(park_concurrency=0))
    able(w)
    w.model("a", park=True)
    w.tick(9)
    assert not w.starts("a")


PARALLEL: dict[str, Any] = {"engine": "vllm", "engine_args": {"tensor_parallel_size": 2}}


def test_multi_device_model_is_parked_on_one_node(w: World) -> None:
    able(w, name="n1")  # one device, with room for all of it
    able(w, 600 * MIB, name="n2", devices=("cpu:0", "cpu:1", "cpu:2"))
    w.model("wide", memory=1000 * MIB, park=True, **PARALLEL)
    w.tick(1)
    (start,) = w.starts("wide")
    assert (start.node, start.command.device_ids) == ("n2", ("cpu:0", "cpu:1"))
    park(w)
    assert seen(w, "wide").state == "parked"
    w.demand("wide")
    assert len(w.sent(SendResume)) == 1
    assert len(w.starts("wide")) == 1


def test_multi_device_parking_needs_room_on_each_device(w: World) -> None:
    able(w, 600 * MIB, name="n1", devices=("cpu:0", "cpu:1"))
    w.model("here")
    w.up("here")
    w.model("wide", memory=1000 * MIB, park=True, **PARALLEL)
    w.tick(1)
    assert not w.starts("wide")
    assert seen(w, "wide").state == "waiting"
    assert "free" in seen(w, "wide").reason
    w.remove("here")
    w.finish_stops()
    w.tick(1)
    assert w.starts("wide")
