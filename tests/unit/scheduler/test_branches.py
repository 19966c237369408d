"""One test for each numbered branch of placement, settling and observing."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.domain.booking import booking
from services.scheduler.domain.effects import LoadEnded, PublishLoadFailed, SendPrepare, SendRelease, StepDown
from services.scheduler.domain.events import NodeStatusHeard, StartRefused, WaiterGone
from services.scheduler.domain.policy import Policy
from shared.contracts.admin import ModelAsleep, ModelAwake
from shared.contracts.base import ErrorBody
from shared.contracts.engines import CAPABILITIES
from shared.contracts.node import InstanceState
from shared.errors import CheckpointInvalid, EngineFailed, Unreachable
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import Agent, World, no_room

READY = InstanceState.READY
DRAINING = InstanceState.DRAINING
# A model of 100 MiB of weights needs 100 + 32 (KV) + 192 (runtime) MiB: two fit 700 MiB, three do not.
TWO = 700 * MIB
assert CAPABILITIES["builtin"].runtime_bytes == 192 * MIB


@pytest.fixture
def w() -> World:
    return World()


def three(w: World) -> Agent:
    agent = w.node(budget=TWO)
    for name in "abc":
        w.model(name)
    return agent


# Placement.


def test_1_replicas_min_backs_off_after_failures(w: World) -> None:
    w.node()
    w.model("a", replicas={"min": 1, "max": 1})
    assert len(w.starts("a")) == 1
    w.fail("a", CheckpointInvalid("bad shard").body())
    for _ in range(3):
        w.tick(0.25)
    assert len(w.starts("a")) == 1
    assert w.state.last_plan_of("a").reason.startswith("backing off")  # type: ignore[union-attr]
    w.tick(0.5)
    assert len(w.starts("a")) == 2
    w.fail("a", CheckpointInvalid("bad shard").body())
    w.tick(1.5)
    assert len(w.starts("a")) == 2
    w.tick(1.0)
    assert len(w.starts("a")) == 3


def test_1_a_back_off_has_a_limit() -> None:
    assert [Policy().backoff(n) for n in (1, 2, 3, 6, 50)] == [1.0, 2.0, 4.0, 30.0, 30.0]


def test_2_without_nodes_demand_waits_then_fails(w: World) -> None:
    w.model("a")
    noted = w.demand("a")
    assert noted.outlook == "waiting"
    assert "no node is alive" in noted.reason
    for _ in range(29):
        w.now += 1
        w.demand("a")
    assert not w.sent(PublishLoadFailed)
    w.now += 2
    w.demand("a")
    assert w.sent(PublishLoadFailed)[0].event.error.code == "unavailable"


def test_2_a_node_that_appears_takes_what_waits(w: World) -> None:
    w.model("a")
    plan = w.demand("a").plan_id
    w.node()
    assert len(w.starts("a")) == 1
    assert w.starts("a")[0].command.plan_id == plan


def test_3_what_can_never_fit_is_told_at_once(w: World) -> None:
    w.model("big", weights=2000 * MIB)
    w.node(budget=1000 * MIB)
    w.demand("big")
    (failed,) = w.sent(PublishLoadFailed)
    assert failed.event.error.code == "insufficient_memory"
    for part in ("2.17 GiB", "1000 MiB", "max_model_len"):
        assert part in failed.event.error.message
    assert w.state.models["big"].error == failed.event.error.message
    assert w.state.last_plan_of("big").way == "impossible"  # type: ignore[union-attr]


def test_the_loader_is_told_which_gpu_the_builtin_engine_computes_on(w: World) -> None:
    w.node().devices = ("cuda:0",)
    w.hear("n1")
    w.model("a")
    w.demand("a")
    assert [s.command.device for s in w.sent(SendPrepare)] == ["cuda:0"]


def test_4_one_load_for_many_waiters(w: World) -> None:
    w.node()
    w.model("a")
    assert {w.demand("a", 5, gateway=f"g{i}").outlook for i in range(20)} == {"starting"}
    assert len(w.starts("a")) == len(w.sent(SendPrepare)) == 1
    w.get_ready()
    assert w.demand("a").outlook == "ready"
    assert len(w.starts("a")) == 1


@pytest.mark.parametrize("held", [True, False])
def test_4_the_soonest_device_is_taken(w: World, held: bool) -> None:
    """Where the weights are in memory already: held by an instance, or cached by the loader."""
    from services.scheduler.domain.events import LoaderStatusHeard
    from shared.contracts.loader import CachedModel, LoaderStatus, SegmentStatus

    w.node("n1")
    w.node("n2")
    w.model("a")
    segment = SegmentStatus(weights_id="rev-/m/a", model="a", segment="s", total_bytes=1, loaded_bytes=1, holders=())
    cached = CachedModel(weights_id="rev-/m/a", tier="dram", nbytes=1)
    elsewhere = CachedModel(weights_id="rev-/m/a", tier="ssd", nbytes=1)
    where = {"segments": (segment,)} if held else {"cached": (cached,)}
    w.send(LoaderStatusHeard(w.now, LoaderStatus(node="n1", boot_id="b", cached=(elsewhere,))))
    w.send(LoaderStatusHeard(w.now, LoaderStatus.model_validate({"node": "n2", "boot_id": "b", **where})))
    w.demand("a")
    assert w.starts("a")[0].node == "n2"
    assert [c.node for c in w.state.last_plan_of("a").candidates] == ["n1", "n2"]  # type: ignore[union-attr]


def test_5_room_that_is_coming_is_claimed(w: World) -> None:
    three(w)
    w.up("a")
    w.up("b")
    w.sleep("a")
    w.demand("c")
    assert not w.starts("c")
    assert not w.stops("b")
    w.agents["n1"].finish_stops()
    w.hear()
    assert len(w.starts("c")) == 1


def test_6_the_longest_idle_leaves_and_the_start_waits_for_its_bytes(w: World) -> None:
    agent = three(w)
    w.up("a")
    w.tick(5)
    w.up("b")
    w.tick(5)
    w.demand("c")
    assert [s.command.only_if_idle for s in w.stops("a")] == [True]
    assert not w.stops("b")
    assert not w.starts("c"), "its bytes are not free yet"
    w.demand("b")
    agent.finish_stops()
    w.hear()
    assert len(w.starts("c")) == 1


def test_6_pinned_instances_stay(w: World) -> None:
    agent = w.node(budget=TWO)
    w.model("a", pin=True)
    w.model("b")
    w.model("c")
    w.up("a")
    w.tick(5)
    w.up("b")
    w.tick(5)
    w.demand("c")
    assert not w.stops("a")
    assert len(w.stops("b")) == 1
    assert "is pinned" not in w.state.last_plan_of("c").reason  # type: ignore[union-attr]
    agent.finish_stops()
    w.tick(1)
    w.get_ready()
    for _ in range(40):
        w.tick(1)
        w.demand("b")
    assert not w.stops("a")


def test_6_a_busy_victim_stays_and_another_goes(w: World) -> None:
    three(w)
    a = w.up("a")
    w.tick(5)
    w.up("b")
    w.tick(5)
    a.active = 1  # since the last status
    w.demand("c")
    assert len(w.stops("a")) == 1
    assert a.state is READY
    assert len(w.stops("b")) == 1
    assert w.state.instances[a.command.instance_id].leaving == "no"


def test_6_a_new_instance_is_safe_until_it_has_served(w: World) -> None:
    three(w)
    w.up("a", served=0)
    w.up("b", served=0)
    assert w.demand("c").outlook == "waiting"
    w.tick(w.policy.min_active)
    assert w.demand("c").outlook == "starting"


def test_6_no_more_leave_than_needed(w: World) -> None:
    agent = w.node(budget=324 * MIB + 324 * MIB + 1000 * MIB)
    w.model("small", 100 * MIB)
    w.model("large", 700 * MIB)
    w.model("next", 700 * MIB)
    w.up("small")
    w.tick(5)
    w.up("large")
    w.tick(5)
    w.demand("next")
    assert not w.stops("small")
    assert len(w.stops("large")) == 1
    assert agent.budget


def test_7_who_waits_too_long_may_displace_one_that_serves(w: World) -> None:
    three(w)
    a, b = w.up("a"), w.up("b")
    for _ in range(14):
        a.active = b.active = 1
        w.tick(1)
        w.demand("c")
    assert not w.stops("a")
    assert not w.stops("b")
    w.tick(2.5)
    w.demand("c")
    (stop,) = w.stops("a") + w.stops("b")
    assert not stop.command.only_if_idle
    assert not w.starts("c")
    a.active = b.active = 0
    w.agents["n1"].finish_stops()
    w.hear()
    assert len(w.starts("c")) == 1


def test_7_one_that_has_refused_as_busy_is_drained_though_its_node_has_not_said_so_yet(w: World) -> None:
    agent = three(w)
    a, b = w.up("a"), w.up("b")
    for seconds in range(14):
        a.active = b.active = 1
        w.tick(1)
        w.demand("c", oldest_wait_ms=seconds * 1000)
    w.now += 2
    a.active = b.active = 0
    idle = agent.status(w.now)
    a.active = b.active = 1
    w.send(NodeStatusHeard(w.now, idle))
    stops = [s.command.only_if_idle for s in w.stops("a") + w.stops("b")]
    assert sorted(stops) == [False, True, True], "each is asked once, then one is drained"


def test_8_what_is_in_the_way_is_named(w: World) -> None:
    three(w)
    w.up("a").active = 1
    w.up("b").active = 1
    w.tick(5)
    noted = w.demand("c")
    assert noted.outlook == "waiting"
    assert noted.reason.count("is serving") == 2
    plan = w.state.last_plan_of("c")
    assert plan is not None
    assert plan.way == "wait"
    w.demand("c", 0)
    assert w.state.last_plan_of("c").outcome == "cancelled"  # type: ignore[union-attr]


def test_priority_goes_before_waiting_time(w: World) -> None:
    w.model("low")
    w.model("high", priority=5)
    w.demand("low", oldest_wait_ms=9000)
    w.demand("high")
    w.node(budget=400 * MIB)
    assert len(w.starts("high")) == 1
    assert not w.starts("low")


# Settling.


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


def test_a_wake_given_up_cancels_its_start(w: World) -> None:
    w.node()
    w.model("a")
    waiter = w.wake("a")
    w.send(WaiterGone(w.now, waiter))
    assert len(w.stops("a")) == 1


def test_sleep_answers_with_the_bytes_freed(w: World) -> None:
    agent = w.node()
    w.model("a", replicas={"min": 1, "max": 1})
    w.get_ready()
    waiter = w.sleep("a")
    assert w.answer(waiter) is None
    agent.finish_stops()
    w.hear()
    answer = w.answer(waiter)
    assert isinstance(answer, ModelAsleep)
    assert answer.freed_bytes == 324 * MIB
    w.tick(5)
    assert len(w.starts("a")) == 1, "replicas.min rests until somebody asks"
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


def test_keep_alive_counts_from_the_last_request(w: World) -> None:
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


def test_a_start_nobody_waits_for_is_cancelled(w: World) -> None:
    w.node()
    w.model("a")
    w.demand("a", 1, gateway="g1")
    w.demand("a", 1, gateway="g2")
    w.demand("a", 0, gateway="g1")
    assert not w.stops("a")
    w.demand("a", 0, gateway="g2")
    assert len(w.stops("a")) == 1
    w.agents["n1"].finish_stops()
    w.hear()
    assert w.state.last_plan_of("a").outcome == "cancelled"  # type: ignore[union-attr]


def test_a_gateway_that_falls_silent_waits_no_longer(w: World) -> None:
    w.node()
    w.model("a")
    w.demand("a")
    w.tick(4)
    assert not w.stops("a")
    w.tick(2)
    assert len(w.stops("a")) == 1


def test_more_replicas_when_the_queue_asks_and_memory_allows(w: World) -> None:
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


@pytest.mark.parametrize(("told", "instances"), [({}, 2), ({"window": 9}, 3), ({"window": 1, "peak": 14}, 4)])
def test_what_came_in_the_last_window_is_expected_again(w: World, told: dict[str, Any], instances: int) -> None:
    w.node(budget=4000 * MIB)
    w.model("a", replicas={"min": 0, "max": 8}, max_concurrency=8)
    w.up("a").active = 8
    for _ in range(2):
        w.demand("a", 4, in_flight=8, **told)
        w.tick(1.1)
    assert len(w.starts("a")) == instances


def test_a_replica_more_displaces_nobody_who_has_demand(w: World) -> None:
    w.node(budget=TWO)
    w.model("a", replicas={"min": 0, "max": 2}, max_concurrency=4)
    w.model("b")
    w.up("a").active = 4
    b = w.up("b")
    b.active = 1
    for _ in range(30):
        w.tick(1)
        w.demand("a", 6, in_flight=4)
    assert not w.stops("b")
    assert len(w.starts("a")) == 1


# Failures.


def test_a_failed_start_is_tried_once_more_elsewhere(w: World) -> None:
    w.node("n1")
    w.node("n2")
    w.model("a")
    w.demand("a")
    first = w.starts("a")[0].node
    w.fail("a", EngineFailed("boom").body())
    assert [s.node for s in w.starts("a")] == [first, "n2" if first == "n1" else "n1"]
    assert not w.sent(PublishLoadFailed)
    w.fail("a", EngineFailed("boom again").body())
    (failed,) = w.sent(PublishLoadFailed)
    assert failed.event.error.message == "boom again"
    assert w.state.models["a"].error == "boom again"
    w.tick(3)
    w.demand("a")
    w.get_ready()
    assert w.state.models["a"].error is None


def test_an_invalid_model_is_told_at_once(w: World) -> None:
    w.node()
    w.model("a")
    w.demand("a")
    w.fail("a", CheckpointInvalid("shape of lm_head").body())
    assert len(w.starts("a")) == 1
    assert w.sent(PublishLoadFailed)[0].event.error.code == "checkpoint_invalid"
    w.demand("a", oldest_wait_ms=500)
    assert len(w.starts("a")) == 1, "those waiters are being told"
    w.now += 0.1
    w.demand("a", oldest_wait_ms=0)
    assert len(w.starts("a")) == 2, "the next request may try again"


def test_a_refused_reservation_is_placed_anew(w: World) -> None:
    w.node("n1")
    w.model("a")
    agent = w.agents.pop("n1")  # it hears nothing
    w.demand("a")
    w.agents["n1"] = agent
    w.send(StartRefused(w.now, w.starts("a")[0].command.instance_id, no_room()))
    assert len(w.sent(SendRelease)) == 1
    assert len(w.starts("a")) == 1
    w.tick(1.1)
    assert len(w.starts("a")) == 2
    assert not w.sent(PublishLoadFailed)


def test_an_unreachable_node_counts_as_a_failed_start(w: World) -> None:
    w.node("n1")
    w.node("n2")
    w.model("a")
    hidden = dict(w.agents)
    w.agents.clear()
    w.demand("a")
    w.agents.update(hidden)
    start = w.starts("a")[0]
    w.send(StartRefused(w.now, start.command.instance_id, Unreachable("nobody").body()))
    assert w.starts("a")[1].node != start.node


def test_a_stale_token_deposes(w: World) -> None:
    w.node().highest = 2**40
    w.model("a")
    w.demand("a")
    assert w.sent(StepDown)


def test_a_start_without_progress_is_stopped_and_counted_as_failed(w: World) -> None:
    agent = w.node("n1")
    w.node("n2")
    w.model("a", init_timeout=60)
    w.demand("a")
    (start,) = w.starts("a")
    running = w.agents[start.node].instances[start.command.instance_id]
    for _ in range(89):
        w.tick(1)
        w.demand("a")
    running.progress = 0.5
    for _ in range(90):
        w.tick(1)
        w.demand("a")
    assert not w.stops("a"), "it has got on meanwhile"
    w.tick(2)
    w.demand("a")
    assert [s.command.instance_id for s in w.stops("a")] == [start.command.instance_id]
    (ended,) = w.sent(LoadEnded)
    assert ended.plan.outcome == "failed"
    assert "no progress" in ended.plan.error.message  # type: ignore[union-attr]
    assert w.starts("a")[1].node != start.node, "once more, elsewhere"
    booked = booking(w.state, start.node, "cpu:0")
    assert booked.held == 324 * MIB, "its bytes are not free before it is gone"
    agent.finish_stops()
    w.agents["n2"].finish_stops()
    w.get_ready()
    assert w.demand("a").outlook == "ready"
    assert len(w.starts("a")) == 2


# Observing.


def test_reports_of_the_past_are_ignored(w: World) -> None:
    agent = w.node()
    w.model("a")
    old = agent.status(w.now)
    w.demand("a")
    w.get_ready()
    w.send(NodeStatusHeard(w.now + 10, old))
    assert w.state.instances


def test_a_newer_epoch_deposes(w: World) -> None:
    agent = w.node()
    w.model("a")
    w.up("a")
    later = World(epoch=0)
    later.model("a")
    later.send(NodeStatusHeard(later.now, agent.status(later.now)))
    assert later.sent(StepDown)[0].epoch == 1


def test_an_unknown_instance_is_adopted_if_wanted(w: World) -> None:
    agent = w.node()
    w.model("a")
    w.up("a")
    heir = World(epoch=2)
    heir.model("a")
    heir.agents["n1"] = agent
    heir.hear()
    assert heir.demand("a").outlook == "ready"
    assert not heir.starts("a")
    stranger = World(epoch=2)
    stranger.agents["n1"] = agent
    stranger.hear()
    assert agent.instances[next(iter(agent.instances))].state is DRAINING


def test_an_instance_that_vanished_is_replaced(w: World) -> None:
    agent = w.node()
    w.model("a")
    w.up("a")
    w.tick(1)
    agent.instances.clear()
    agent.boot, agent.seq = "boot-2", 0
    w.hear()
    w.now += 5
    w.hear()
    assert not w.state.instances
    w.demand("a")
    assert len(w.starts("a")) == 2


def test_a_silent_node_is_lost_and_readopted(w: World) -> None:
    agent = w.node("n1")
    w.model("a")
    w.up("a")
    w.tick(6, heard=False)
    assert not w.state.instances
    assert w.demand("a").outlook == "waiting"
    w.hear()
    assert w.demand("a").outlook == "ready"
    assert len(agent.instances) == len(w.starts("a")) == 1


def test_what_was_replaced_meanwhile_is_stopped_on_return(w: World) -> None:
    w.node("n1")
    w.model("a")
    w.up("a")
    w.node("n2")
    w.now += 6
    w.hear("n2")
    w.tick(heard=False)
    w.demand("a")
    w.hear("n2")
    assert [s.node for s in w.starts("a")] == ["n1", "n2"]
    w.hear("n1")
    assert [r.state for r in w.agents["n1"].instances.values()] == [DRAINING]


def test_plans_record_their_end(w: World) -> None:
    w.node()
    w.model("a")
    w.demand("a", traceparents=("00-" + "1" * 32 + "-" + "2" * 16 + "-01",))
    w.now += 3
    w.get_ready()
    (ended,) = w.sent(LoadEnded)
    assert ended.plan.outcome == "ready"
    assert ended.plan.measured_ms == pytest.approx(3000)
    w.fail("a", EngineFailed("later").body())
    assert len(w.sent(LoadEnded)) == 1
    assert isinstance(w.state.trouble["a"].error, ErrorBody)


# Scale-up beside pressure, drain timeout, forgotten nodes.


def test_7_an_extra_replica_never_drains_who_serves_and_rests_when_pressure_is_over(w: World) -> None:
    w.node(budget=TWO)
    w.model("a", replicas={"min": 0, "max": 2}, max_concurrency=4)
    w.model("b")
    w.up("a").active = 4
    b = w.up("b")
    b.active = 1
    w.tick(1)
    w.demand("a", 6, in_flight=4)
    assert "a" in w.state.pressure
    w.tick(20)
    w.demand("a", 6, in_flight=4)
    assert not w.stops("b"), "longer than preempt_after, but b serves"
    assert "a" not in w.state.unmet, "an extra replica is no need"
    w.demand("a", 0, in_flight=4)
    assert "a" not in w.state.pressure
    b.active = 0
    b.completed += 1
    w.tick(5)
    assert not w.stops("b")


def test_6_an_extra_replica_takes_the_place_of_one_that_nobody_wants(w: World) -> None:
    agent = w.node(budget=TWO)
    w.model("a", replicas={"min": 0, "max": 2}, max_concurrency=4)
    w.model("b")
    w.up("a").active = 4
    w.up("b")
    w.tick(3)
    for _ in range(2):
        w.tick(1.1)
        w.demand("a", 6, in_flight=4)
    assert [s.command.only_if_idle for s in w.stops("b")] == [True]
    agent.finish_stops()
    w.hear()
    assert len(w.starts("a")) == 2


def test_a_drained_node_is_emptied_of_who_serves_after_drain_timeout(w: World) -> None:
    w.node("n1")
    w.model("a", keep_alive=-1)
    w.model("b", keep_alive=-1)
    w.up("a").active = 1
    w.up("b")
    w.change_node("n1", "drain")
    assert len(w.stops("b")) == 1, "idle: leaves at once"
    w.tick(w.policy.drain_timeout)
    assert not w.stops("a")
    w.tick(1)
    assert [s.command.only_if_idle for s in w.stops("a")] == [False]


def test_a_node_silent_for_a_day_is_forgotten(w: World) -> None:
    w.node("n1")
    w.node("n2")
    w.model("a")
    agent = w.agents.pop("n1")
    w.tick(86_400)
    assert set(w.state.nodes) == {"n1", "n2"}
    w.tick(60)
    assert set(w.state.nodes) == set(w.state.presence) == {"n2"}
    assert {b.node for b in w.state.bookings.values()} == {"n2"}
    w.agents["n1"] = agent
    w.hear("n1")
    assert set(w.state.nodes) == {"n1", "n2"}
