"""Victims and claims: rules 5 to 8 of placement."""

from __future__ import annotations

from services.scheduler.domain.events import NodeStatusReceived
from shared.contracts.engines import CAPABILITIES
from shared.contracts.node import InstanceState
from tests.support.fake_node import MIB
from tests.unit.scheduler.fake_agents import Agent, Running
from tests.unit.scheduler.world import World

# A model of 100 MiB of weights needs 100 + 32 (KV) + 192 (runtime) MiB: two fit 700 MiB, three do
# not.
TWO = 700 * MIB
assert CAPABILITIES["builtin"].runtime_bytes == 192 * MIB


def three(w: World) -> Agent:
    agent = w.node(budget=TWO)
    for name in "abc":
        w.model(name)
    return agent


def serve(w: World, popular: Running, rare: Running, *, more: int) -> None:
    """Let `popular` serve `more` requests, and `rare` its second one after them."""
    w.tick(5)
    popular.completed, popular.idle_since = popular.completed + more, w.now
    w.tick(2)
    rare.completed, rare.idle_since = 2, w.now
    w.report()


def test_5_memory_of_a_stopping_instance_is_claimed(w: World) -> None:
    three(w)
    w.up("a")
    w.up("b")
    w.sleep("a")
    w.demand("c")
    assert not w.starts("c")
    assert not w.stops("b")
    w.agents["n1"].finish_stops()
    w.report()
    assert len(w.starts("c")) == 1


def wait_for_stuck(w: World, model: str) -> None:
    """Let requests wait for `model` until a stopping instance counts as one that stays."""
    for _ in range(int(w.policy.drain_timeout_s + w.policy.stuck_after_s)):
        w.tick(1)
        w.demand(model)


def test_5_memory_of_an_instance_that_does_not_stop_is_claimed_with_a_bound(w: World) -> None:
    """Its process survives SIGKILL, as in a driver that hangs: another instance leaves."""
    three(w)
    w.up("a")
    b = w.up("b")
    w.sleep("a")
    w.demand("c")
    wait_for_stuck(w, "c")
    assert not w.stops("b")
    w.tick(2)
    assert len(w.stops("b")) == 1
    assert not w.starts("c")
    b.state = InstanceState.STOPPED
    w.report()
    assert len(w.starts("c")) == 1


def test_5_model_that_waits_for_an_instance_that_does_not_stop_names_it(w: World) -> None:
    w.node(budget=400 * MIB)
    w.model("a")
    w.model("c")
    a = w.up("a")
    w.sleep("a")
    w.demand("c")
    wait_for_stuck(w, "c")
    w.tick(2)
    plan = w.state.last_plan_of("c")
    assert plan is not None
    assert plan.reason.endswith(f"should have ended, but still holds memory: {a.command.instance_id}")
    assert plan.way == "wait"
    w.finish_stops()
    assert len(w.starts("c")) == 1


def test_6_longest_idle_instance_is_evicted_and_the_start_waits_for_its_memory(w: World) -> None:
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
    w.report()
    assert len(w.starts("c")) == 1


def test_6_popular_instance_stays_although_it_is_idle_for_longer(w: World) -> None:
    """While a popular model starts again, more of its requests arrive."""
    three(w)
    popular, rare = w.up("a", served=0), w.up("b")
    serve(w, popular, rare, more=100)
    w.demand("c")
    assert len(w.stops("b")) == 1
    assert not w.stops("a")


def test_6_rates_of_requests_are_measured_again_after_a_change_of_leaders(w: World) -> None:
    """The new leader counts from its first report of an instance, however old the instance is."""
    three(w)
    popular = w.up("a")
    w.tick(280)
    w.change_leader()
    w.report()
    rare = w.up("b", served=0)
    serve(w, popular, rare, more=20)
    w.demand("c")
    assert len(w.stops("b")) == 1
    assert not w.stops("a")


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


def test_6_busy_victim_stays_and_another_is_evicted(w: World) -> None:
    three(w)
    a = w.up("a")
    w.tick(5)
    w.up("b")
    w.tick(5)
    a.active = 1  # since the last status
    w.demand("c")
    assert len(w.stops("a")) == 1
    assert a.state is InstanceState.READY
    assert len(w.stops("b")) == 1
    assert w.state.instances[a.command.instance_id].leaving == "no"


def test_6_new_instance_is_not_evicted_before_it_has_served(w: World) -> None:
    three(w)
    w.up("a", served=0)
    w.up("b", served=0)
    assert w.demand("c").outlook == "waiting"
    w.tick(w.policy.min_active_s)
    assert w.demand("c").outlook == "starting"


def test_6_no_more_instances_are_evicted_than_needed(w: World) -> None:
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


def test_7_request_that_waits_too_long_may_preempt_a_serving_instance(w: World) -> None:
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
    w.report()
    assert len(w.starts("c")) == 1


def test_7_victim_with_the_shortest_queue_is_preempted_first(w: World) -> None:
    """The victim with the shortest queue goes first, in engine and gateway together.

    Engines run as many requests as they can at once; gateways queue the others.
    """
    three(w)
    a, b = w.up("a"), w.up("b")
    a.active = b.active = 1
    for _ in range(16):
        w.tick(1)
        w.demand("a", 20)
        w.demand("c")
    w.tick(1)
    w.demand("c")
    assert not w.stops("a"), "twenty wait for it"
    (stop,) = w.stops("b")
    assert not stop.command.only_if_idle


def test_7_victim_that_refused_as_busy_is_drained_before_its_node_reports_it(w: World) -> None:
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
    w.send(NodeStatusReceived(w.now, idle))
    stops = [s.command.only_if_idle for s in w.stops("a") + w.stops("b")]
    assert sorted(stops) == [False, True, True], "each is asked once, then one is drained"


def test_8_plan_names_the_serving_instances_that_block_it(w: World) -> None:
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


def test_an_extra_replica_evicts_no_instance_with_demand(w: World) -> None:
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


def test_7_extra_replica_never_preempts_a_serving_instance(w: World) -> None:
    w.node(budget=TWO)
    w.model("a", replicas={"min": 0, "max": 2}, max_concurrency=4)
    w.model("b")
    w.up("a").active = 4
    b = w.up("b")
    b.active = 1
    w.tick(1)
    w.demand("a", 6, in_flight=4)
    assert "a" in w.state.overload
    w.tick(20)
    w.demand("a", 6, in_flight=4)
    assert not w.stops("b"), "longer than preempt_after, but b serves"
    assert "a" not in w.state.unschedulable, "an extra replica is no need"
    w.demand("a", 0, in_flight=4)
    assert "a" not in w.state.overload
    b.active = 0
    b.completed += 1
    w.tick(5)
    assert not w.stops("b")


def test_6_an_extra_replica_evicts_an_instance_without_demand(w: World) -> None:
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
    w.report()
    assert len(w.starts("a")) == 2
