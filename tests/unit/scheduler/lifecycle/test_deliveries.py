"""Starts and resumptions that reach their node long after the decision."""

from __future__ import annotations

from services.scheduler.domain.effects import SendResume, SendStart
from services.scheduler.domain.events import CommandAccepted, StartRefused
from shared.contracts.node import InstanceState
from shared.errors import Unreachable
from tests.unit.scheduler.fake_agents import no_room
from tests.unit.scheduler.lifecycle.group_world import make
from tests.unit.scheduler.world import World

LATE_S = 20.0
"""Far beyond `absence_grace_s`: other starts for the node wait for answers, one after the other."""


def wait(w: World, model: str, seconds: float, step: float = 0.5) -> None:
    """Let time pass, with reports of all nodes and of a gateway whose request waits."""
    for _ in range(round(seconds / step)):
        w.tick(step)
        w.demand(model)


def test_a_start_that_waits_for_its_node_is_not_missing(w: World) -> None:
    agent = w.node()
    w.model("a")
    w.undelivered = []
    w.demand("a")
    agent.boot, agent.seq = "boot-2", 0  # its agent was replaced before the start arrived
    wait(w, "a", LATE_S)
    assert len(w.starts("a")) == 1, "no other start of the model while the first one waits"
    w.deliver()
    w.get_ready("a")
    assert [r.state for r in w.of("a")] == [InstanceState.READY]
    assert set(w.state.instances) == set(agent.instances)
    assert w.demand("a").outlook == "ready"


def test_a_start_that_its_node_accepted_and_lost_is_missing(w: World) -> None:
    agent = w.node()
    w.model("a")
    w.undelivered = []
    w.demand("a")
    wait(w, "a", LATE_S)
    w.deliver()
    agent.instances.clear()
    agent.boot, agent.seq = "boot-2", 0  # it had answered, and died before it recorded the start
    w.report()
    assert w.state.instances, "its answer is newer than `absence_grace_s`"
    wait(w, "a", w.policy.absence_grace_s + 1)
    assert len(w.starts("a")) == 2
    assert set(w.state.instances) == set(agent.instances)


def test_a_start_that_was_given_up_is_not_sent(w: World) -> None:
    agent = w.node("n1")
    w.model("a")
    w.undelivered = []
    w.demand("a")
    w.tick(w.policy.node_lost_after_s + 1, nodes_report=False)
    assert not w.state.instances, "its node is lost"
    w.deliver()
    assert not agent.instances
    w.report()
    w.demand("a")
    assert len(agent.instances) == 1


def test_a_resumption_that_waits_for_its_node_is_not_cancelled(w: World) -> None:
    agent = w.node()
    w.model("a")
    running = w.up("a")
    w.can_suspend(running)
    w.sleep("a")
    agent.finish_stops()
    w.report()
    assert running.state.parked
    w.undelivered = []
    w.demand("a")
    wait(w, "a", LATE_S)
    assert [i.state for i in w.state.instances.values()] == [InstanceState.RESUMING]
    w.deliver()
    w.get_ready("a")
    assert w.demand("a").outlook == "ready"
    assert len(w.starts("a")) == 1, "it was resumed"


def test_stages_that_wait_for_their_nodes_are_not_missing() -> None:
    w = make()
    w.undelivered = []
    w.demand("m")
    wait(w, "m", LATE_S)
    assert len(w.starts("m")) == 2
    w.deliver()
    w.get_ready("m")
    assert w.demand("m").outlook == "ready"


def test_nothing_is_kept_of_instances_that_are_gone(w: World) -> None:
    w.node()
    w.model("a")
    running = w.up("a")
    assert set(w.state.deliveries) == set(w.state.instances)
    w.send(CommandAccepted(w.now, "unknown"))
    w.sleep("a")
    w.finish_stops()
    assert running.command.instance_id not in w.state.instances
    assert not w.state.deliveries


def test_a_running_instance_whose_start_got_no_reply_is_missing_once_its_node_has_lost_it(w: World) -> None:
    """The node began the start; neither its reply nor one to a repeated command arrived."""
    agent = w.node()
    w.model("a")
    w.undelivered = []
    w.demand("a")
    (sent,) = [e for e in w.undelivered if isinstance(e, SendStart)]
    w.undelivered = None
    agent.start(sent.command, w.now)
    w.get_ready("a")
    w.send(StartRefused(w.now, sent.command.instance_id, Unreachable("no reply").body()))
    assert w.demand("a").outlook == "ready"
    agent.instances.clear()
    agent.boot, agent.seq = "boot-2", 0
    wait(w, "a", w.policy.absence_grace_s + 1)
    assert len(w.starts("a")) == 2
    assert set(w.state.instances) == set(agent.instances)


def test_a_suspended_instance_whose_resumption_was_refused_is_gone_with_its_process(w: World) -> None:
    agent = w.node()
    w.model("a")
    running = w.up("a")
    w.can_suspend(running)
    w.sleep("a")
    agent.finish_stops()
    w.report()
    w.undelivered = []
    w.demand("a")
    (resumption,) = [e for e in w.undelivered if isinstance(e, SendResume)]
    w.send(StartRefused(w.now, resumption.command.instance_id, no_room(None)))
    w.demand("a", waiting=0)
    assert [i.state for i in w.state.instances.values()] == [InstanceState.SUSPENDED]
    agent.instances.clear()
    agent.boot, agent.seq = "boot-2", 0
    for _ in range(3):
        w.tick(w.policy.absence_grace_s)
    assert not w.state.instances
