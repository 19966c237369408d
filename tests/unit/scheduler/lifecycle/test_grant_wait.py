"""Starts and resumptions that wait on the node for their victims to stop."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.domain.effects import PublishLoadFailed, SendPrepare, SendResume, SendStart, SendStop
from services.scheduler.domain.events import DemandReceived
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.accounting import booking_of
from shared.contracts.demand import Demand
from shared.contracts.node import InstanceState
from tests.support.fake_node import MIB
from tests.unit.scheduler.fake_agents import Running, no_room
from tests.unit.scheduler.world import World

READY, DRAINING, FAILED = InstanceState.READY, InstanceState.DRAINING, InstanceState.FAILED
PREPARING, RESUMING, SUSPENDED = InstanceState.PREPARING, InstanceState.RESUMING, InstanceState.SUSPENDED
HOSTED: dict[str, Any] = {"engine": "vllm", "memory": 324 * MIB}
"""The engine reads its weights itself: it takes no memory before its node forks it."""
ONE = 400 * MIB


def two(w: World, **second: Any) -> Running:
    """Create a device for one instance, an idle one of "a" on it, and demand for "b"."""
    w.node(budget=ONE)
    w.model("a")
    w.model("b", **second)
    victim = w.up("a")
    w.demand("b")
    return victim


def test_start_is_sent_once_its_victim_is_draining(w: World) -> None:
    victim = two(w, **HOSTED, priority=3)
    assert not w.starts("b"), "its node has not reported yet that the victim drains"
    w.report()
    assert victim.state is DRAINING
    (start,) = w.starts("b")
    assert (start.command.wait_ms, start.command.priority) == (10_000, 3)
    booked = booking_of(w.state, "n1", "cpu:0")
    assert booked.drained_bytes == 324 * MIB
    assert booked.held_bytes > booked.budget_bytes >= booked.held_bytes - booked.leaving_bytes
    assert w.of("b")[0].state is PREPARING, "it waits"
    w.finish_stops()
    w.get_ready("b")
    assert w.of("b", READY)
    assert len(w.starts("b")) == 1, "sent once"


def test_not_while_the_victim_serves(w: World) -> None:
    victim = two(w, **HOSTED)
    victim.active = 1
    w.report()
    assert not w.starts("b")
    victim.active = 0
    w.report()
    assert len(w.starts("b")) == 1


def test_weights_are_not_fetched_into_memory_of_a_victim(w: World) -> None:
    two(w)
    w.report()
    assert not w.starts("b")
    assert [e.command.card.name for e in w.sent(SendPrepare)] == ["a"]
    w.finish_stops()
    (start,) = w.starts("b")
    assert start.command.wait_ms == 0, "nothing leaves there any more"


SHARED: dict[str, Any] = {"isolation": "shared"}
"""The model is attached to an executor: its nodeagent has its weights loaded."""
SHARED_ONE = 400 * MIB


def two_shared(w: World) -> Running:
    """Create a device for one of two shared models, and an idle instance of "a" on it."""
    w.node(budget=SHARED_ONE)
    for name in "ab":
        w.model(name, **SHARED)
    return w.up("a")


def test_shared_start_is_sent_with_the_stop_of_an_idle_victim(w: World) -> None:
    victim = two_shared(w)
    decision = w.send(DemandReceived(w.now, Demand(gateway="g", model="b", waiting=1), "w-b"))
    sent = [e for e in decision.effects if isinstance(e, SendStop | SendStart | SendPrepare)]
    assert [type(e) for e in sent] == [SendStop, SendStart], "the nodeagent has its weights loaded"
    (start,) = w.starts("b")
    assert start.command.wait_ms == 10_000
    assert start.command.grant == start.command.device_ids, "so that the nodeagent prepares it"
    assert victim.state is DRAINING
    booked = booking_of(w.state, "n1", "cpu:0")
    assert booked.held_bytes > booked.budget_bytes >= booked.held_bytes - booked.leaving_bytes
    w.report()
    assert w.agents["n1"].instances[start.command.instance_id].state is PREPARING, "it waits"
    w.finish_stops()
    w.get_ready("b")
    assert w.of("b", READY)
    assert len(w.starts("b")) == 1, "sent once"


def test_shared_start_is_not_sent_while_its_victim_serves(w: World) -> None:
    victim = two_shared(w)
    victim.active = 1
    w.report()
    w.demand("b", oldest_wait_ms=int(w.policy.preempt_after_s * 1e3) + 500)
    assert victim.state is DRAINING
    assert not w.starts("b")
    victim.active = 0
    w.report()
    assert len(w.starts("b")) == 1


def test_shared_start_is_stopped_if_its_victim_is_in_use_after_all(w: World) -> None:
    victim = two_shared(w)
    victim.active = 1  # since its last report
    w.demand("b")
    (start,) = w.starts("b")
    first = start.command.instance_id
    assert victim.state is READY, "it has refused to stop"
    assert [e.command.instance_id for e in w.sent(SendStop)] == [victim.command.instance_id, first]
    booked = booking_of(w.state, "n1", "cpu:0")
    assert booked.held_bytes - booked.leaving_bytes + booked.claimed_bytes <= booked.budget_bytes
    assert not w.state.failures
    victim.active = 0
    w.tick(w.policy.busy_cooldown_s + 1.0)
    w.demand("b")
    assert len(w.starts("b")) == 2, "placed again"
    w.finish_stops()
    w.get_ready("b")
    assert w.of("b", READY)


def test_starts_do_not_wait_on_the_node_if_grant_wait_is_off() -> None:
    w = World(policy=Policy(grant_wait_s=0.0))
    two(w, **HOSTED)
    w.report()
    assert not w.starts("b")
    w.finish_stops()
    assert [s.command.wait_ms for s in w.starts("b")] == [0]


def test_the_next_in_line_does_not_count_on_the_same_bytes(w: World) -> None:
    two(w, **HOSTED)
    w.model("c", **HOSTED)
    w.demand("c")
    w.report()
    assert (len(w.starts("b")), len(w.starts("c"))) == (1, 0)


def test_start_whose_grant_timed_out_is_not_a_model_failure(w: World) -> None:
    """A start that waited in vain is no failure of the model.

    The node reports it in its status; the scheduler places the model again, as after a refusal.
    """
    two(w, **HOSTED)
    w.report()
    w.now += 10.0
    w.report()
    assert w.agents["n1"].instances[w.starts("b")[0].command.instance_id].state is FAILED
    assert not w.state.failures
    assert w.state.models["b"].error is None
    w.finish_stops()
    w.tick(1.5)
    w.demand("b")
    assert len(w.starts("b")) == 2


def test_loader_out_of_memory_is_a_failed_start(w: World) -> None:
    """Insufficient loader memory is a failed start.

    The start is retried once; then the waiting requests fail.
    """
    two(w, **HOSTED)
    w.report()
    w.finish_stops()
    w.fail("b", no_room(None))
    assert w.state.failures["b"].attempts == 1
    w.tick(1.5)
    w.fail("b", no_room(None))
    assert [e.event.model for e in w.sent(PublishLoadFailed)] == ["b"]


@pytest.fixture
def resuming(w: World) -> Running:
    """Send the resumption of a suspended "b" while "a" stops."""
    w.node(budget=ONE)
    w.model("b")
    running = w.up("b")
    w.can_suspend(running, left=8 * MIB)
    w.sleep("b")
    w.finish_stops()
    w.model("a")
    w.up("a")
    w.demand("b")
    assert w.sent(SendStop)
    assert not w.sent(SendResume)
    w.report()
    assert [e.command.wait_ms for e in w.sent(SendResume)] == [10_000]
    assert running.state is SUSPENDED
    return running


def test_a_resumption_waits_too(w: World, resuming: Running) -> None:
    for _ in range(4):
        w.tick(1.0)
    assert len(w.sent(SendResume)) == 1, "though it is suspended still for longer than a command may take"
    w.finish_stops()
    assert resuming.state is RESUMING
    w.get_ready("b")
    assert [i.state for i in w.state.of_model("b")] == [READY]


def test_resume_whose_grant_timed_out_is_requested_again(w: World, resuming: Running) -> None:
    w.tick(10.0)
    assert resuming.error is not None
    assert [i.state for i in w.state.of_model("b")] == [SUSPENDED]
    w.finish_stops()
    w.tick(1.5)
    w.demand("b")
    assert len(w.sent(SendResume)) == 2
    assert resuming.state is RESUMING
    w.get_ready("b")
    assert w.of("b", READY)
