"""Node reports: known, unknown and missing instances, old reports, newer epochs."""

from __future__ import annotations

import pytest

from services.scheduler.domain.effects import ForgetNode, LoadEnded, StepDown
from services.scheduler.domain.events import LoaderStatusReceived, NodeStatusReceived, Tick
from shared.contracts.base import Done, ErrorBody
from shared.contracts.loader import LoaderStatus
from shared.contracts.node import InstanceState
from shared.errors import EngineFailed
from tests.unit.scheduler.world import World

DRAINING = InstanceState.DRAINING


def test_reports_of_the_past_are_ignored(w: World) -> None:
    agent = w.node()
    w.model("a")
    old = agent.status(w.now)
    w.demand("a")
    w.get_ready()
    w.send(NodeStatusReceived(w.now + 10, old))
    assert w.state.instances


def test_a_newer_epoch_deposes(w: World) -> None:
    agent = w.node()
    w.model("a")
    w.up("a")
    later = World(epoch=0)
    later.model("a")
    later.send(NodeStatusReceived(later.now, agent.status(later.now)))
    assert later.sent(StepDown)[0].epoch == 1


def test_an_unknown_instance_is_adopted_if_wanted(w: World) -> None:
    agent = w.node()
    w.model("a")
    w.up("a")
    heir = World(epoch=2)
    heir.model("a")
    heir.agents["n1"] = agent
    heir.report()
    assert heir.demand("a").outlook == "ready"
    assert not heir.starts("a")
    stranger = World(epoch=2)
    stranger.agents["n1"] = agent
    stranger.report()
    assert agent.instances[next(iter(agent.instances))].state is DRAINING


@pytest.mark.parametrize("is_reported", [False, True], ids=["sent", "reported"])
def test_a_load_that_requests_have_joined_is_kept(w: World, is_reported: bool) -> None:
    """A gateway that has sent its requests to a loading instance has none waiting any more."""
    agent = w.node()
    w.model("a")
    w.demand("a")
    [running] = agent.instances.values()
    running.state, running.accepts_requests, running.active = InstanceState.LOADING, True, int(is_reported)
    w.report()
    w.demand("a", waiting=0, in_flight=0 if is_reported else 1)
    w.tick(1)
    w.report()
    assert running.state is InstanceState.LOADING
    running.active = 0
    w.demand("a", waiting=0)
    w.report()
    w.tick(1)
    assert running.state is DRAINING


def test_vanished_instance_is_replaced(w: World) -> None:
    agent = w.node()
    w.model("a")
    w.up("a")
    w.tick(1)
    agent.instances.clear()
    agent.boot, agent.seq = "boot-2", 0
    w.report()
    w.now += 5
    w.report()
    assert not w.state.instances
    w.demand("a")
    assert len(w.starts("a")) == 2


def test_silent_node_is_lost_and_its_instances_readopted(w: World) -> None:
    agent = w.node("n1")
    w.model("a")
    w.up("a")
    w.tick(6, nodes_report=False)
    assert not w.state.instances
    assert w.demand("a").outlook == "waiting"
    w.report()
    assert w.demand("a").outlook == "ready"
    assert len(agent.instances) == len(w.starts("a")) == 1


def test_readopted_instance_is_booked_as_before(w: World) -> None:
    """Its report has only what is used of its KV cache."""
    w.node("n1")
    w.model("a")
    running = w.up("a")
    running.kv_used = 7
    [before] = w.state.instances.values()
    assert before.kv_bytes > 7
    w.tick(6, nodes_report=False)
    assert not w.state.instances
    w.report()
    [adopted] = w.state.instances.values()
    assert (adopted.reserve_bytes, adopted.kv_bytes) == (before.reserve_bytes, before.kv_bytes)


def test_lost_node_is_removed_by_command_and_added_again_when_it_reports(w: World) -> None:
    w.node("n1")
    w.node("n2")
    w.model("a")
    w.up("a")
    refused = w.change_node("n1", "remove")
    assert refused.code == "conflict"
    assert "thaw node drain n1" in refused.message
    w.tick(6, nodes_report=False)
    w.report("n2")
    assert isinstance(w.change_node("n1", "remove"), Done)
    assert set(w.state.nodes) == set(w.state.presence) == {"n2"}
    assert "n1" not in w.state.loaders
    w.demand("a")
    assert w.starts("a")[-1].node == "n2"
    assert w.change_node("n1", "remove").code == "not_found"
    w.report("n1")
    assert set(w.state.nodes) == {"n1", "n2"}


def test_replaced_instance_is_stopped_when_its_node_returns(w: World) -> None:
    w.node("n1")
    w.model("a")
    w.up("a")
    w.node("n2")
    w.now += 6
    w.report("n2")
    w.tick(nodes_report=False)
    w.demand("a")
    w.report("n2")
    assert [s.node for s in w.starts("a")] == ["n1", "n2"]
    w.report("n1")
    assert [r.state for r in w.agents["n1"].instances.values()] == [DRAINING]


def test_plan_records_its_outcome(w: World) -> None:
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
    assert isinstance(w.state.failures["a"].error, ErrorBody)


def test_busy_instances_of_a_drained_node_stop_after_drain_timeout(w: World) -> None:
    w.node("n1")
    w.model("a", keep_alive=-1)
    w.model("b", keep_alive=-1)
    w.up("a").active = 1
    w.up("b")
    w.change_node("n1", "drain")
    assert len(w.stops("b")) == 1, "idle: leaves at once"
    w.tick(w.policy.drain_timeout_s)
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
    w.report("n1")
    assert set(w.state.nodes) == {"n1", "n2"}


def test_a_report_of_changes_examines_only_these(w: World) -> None:
    agent = w.node()
    for model in ("a", "b"):
        w.model(model)
        w.up(model)
    by_model = {r.command.card.name: key for key, r in agent.instances.items()}
    for running in agent.instances.values():
        running.state, running.error = InstanceState.FAILED, EngineFailed("gone").body()
    status = agent.status(w.now)
    w.send(NodeStatusReceived(w.now, status, frozenset({by_model["a"]})))
    assert [i.model for i in w.state.instances.values()] == ["b"]
    w.send(NodeStatusReceived(w.now, status))
    assert not w.state.instances


def test_changes_of_a_node_that_was_silent_are_taken_as_a_whole(w: World) -> None:
    agent = w.node()
    w.model("a")
    w.up("a")
    w.tick(w.policy.node_lost_after_s + 1, nodes_report=False)
    assert not w.state.instances
    w.send(NodeStatusReceived(w.now, agent.status(w.now), frozenset()))
    assert [i.model for i in w.state.instances.values()] == ["a"], "its instances were adopted"


def test_instance_that_its_node_drained_and_kept_serves_again(w: World) -> None:
    """Its node was silent while the instance was being suspended, which then did not succeed."""
    w.node()
    w.model("a", keep_alive=10)
    running = w.up("a")
    w.tick(6, nodes_report=False)
    running.state = DRAINING
    w.report()
    running.state = InstanceState.READY
    w.report()
    assert w.demand("a").outlook == "ready"
    assert len(w.starts("a")) == 1
    w.demand("a", waiting=0)
    running.idle_since = w.now
    w.tick(20)
    assert running.state is DRAINING, "its keep-alive is over"


def test_tick_that_waited_for_its_decision_takes_no_node_for_lost(w: World) -> None:
    """The messages of the nodes wait behind it."""
    w.node()
    w.model("a")
    w.up("a")
    due = Tick(w.now)
    w.now += 6
    w.send(due)
    assert w.state.presence["n1"].alive
    w.send(Tick(w.now))
    assert not w.state.presence["n1"].alive


def test_a_loader_without_a_nodeagent_is_forgotten_after_a_silent_day(w: World) -> None:
    w.send(LoaderStatusReceived(w.now, LoaderStatus(node="alone", boot_id="b")))
    w.tick(86_399)
    assert not w.sent(ForgetNode)
    w.tick(2)
    assert [e.node for e in w.sent(ForgetNode)] == ["alone"]
    assert not w.state.loaders
