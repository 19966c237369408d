"""A leader whose own connection to NATS is lost: the silence of others proves nothing."""

from __future__ import annotations

import pytest

from services.scheduler.domain.effects import SendStop
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.prewarm.pulls import LOST_AFTER_S
from shared.contracts.admin import ModelPulled
from shared.contracts.node import InstanceState
from tests.unit.scheduler.lifecycle.group_world import STAGES, make
from tests.unit.scheduler.prewarm.pull_world import REVISION, pull, report, world
from tests.unit.scheduler.world import World

LOST_S = Policy().node_lost_after_s


def test_nodes_are_not_lost_while_the_leader_is_disconnected(w: World) -> None:
    w.node()
    w.model("a")
    w.up("a")
    for _ in range(3):
        w.tick(LOST_S, nodes_report=False, connected_since=None)
        assert w.state.presence["n1"].alive
    assert len(w.state.instances) == 1


def test_nodes_have_time_to_report_after_a_reconnection(w: World) -> None:
    for name in ("n1", "n2"):
        w.node(name)
    w.tick(60, nodes_report=False, connected_since=None)
    back_at = w.now
    w.tick(LOST_S - 0.1, nodes_report=False, connected_since=back_at)
    assert all(p.alive for p in w.state.presence.values())
    w.report("n1")
    w.tick(0.1, nodes_report=False, connected_since=back_at)
    assert {name: p.alive for name, p in w.state.presence.items()} == {"n1": True, "n2": False}


def test_a_single_node_is_lost_in_time_while_the_connection_works(w: World) -> None:
    w.node()
    connected_since = w.now - LOST_S
    w.tick(LOST_S, nodes_report=False, connected_since=connected_since)
    assert w.state.presence["n1"].alive
    w.tick(0.1, nodes_report=False, connected_since=connected_since)
    assert not w.state.presence["n1"].alive


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_group_on_several_nodes_outlives_a_lost_connection(is_ready: bool) -> None:
    w = make()
    w.demand("m")
    if is_ready:
        w.get_ready("m")
    w.tick(LOST_S + 1, nodes_report=False, connected_since=None)
    back_at = w.now
    for seconds in (1, LOST_S):
        w.tick(seconds, connected_since=back_at)
        w.demand("m")
    assert len(w.of("m")) == len(w.starts("m")) == STAGES
    assert not w.sent(SendStop)


def test_demand_outlives_a_lost_connection(w: World) -> None:
    w.node()
    w.model("a")
    w.demand("a")
    w.tick(w.policy.demand_lost_after_s + 1, nodes_report=False, connected_since=None)
    assert w.state.waiting_count("a") == 1
    [running] = w.of("a")
    assert running.state is InstanceState.LOADING


def test_a_start_is_not_stalled_while_its_node_cannot_report(w: World) -> None:
    w.node()
    w.model("a", init_timeout=10.0, replicas={"min": 1})
    w.tick(1)
    [running] = w.of("a")
    w.tick(10.0 + w.policy.init_grace_s + 1, nodes_report=False, connected_since=None)
    assert not w.sent(SendStop)
    running.state = InstanceState.READY
    w.tick(LOST_S, connected_since=w.now)
    assert not w.sent(SendStop)


def test_a_pull_outlives_a_lost_connection() -> None:
    w = world()
    report(w)
    waiter = pull(w)
    w.tick(LOST_AFTER_S + 1, nodes_report=False, connected_since=None)
    w.tick(1, connected_since=w.now)
    assert waiter in w.state.waiters
    report(w, disk=(REVISION,))
    assert isinstance(w.answer(waiter), ModelPulled)


def test_keep_alive_does_not_end_by_a_report_from_before_the_connection_was_lost(w: World) -> None:
    """The instance may have served since: its gateways need no scheduler for that."""
    w.node()
    w.model("a", keep_alive=30.0)
    running = w.up("a")
    w.tick(60, nodes_report=False, connected_since=None)
    back_at = w.now
    w.tick(0.1, nodes_report=False, connected_since=back_at)
    assert not w.sent(SendStop)
    running.completed, running.idle_since = running.completed + 1, w.now - 1
    w.tick(1, connected_since=back_at)
    assert not w.sent(SendStop)
    w.tick(28.1, connected_since=back_at)
    assert [s.command.instance_id for s in w.sent(SendStop)] == [running.command.instance_id]
