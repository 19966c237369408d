"""Starts that fail, are refused, or make no progress."""

from __future__ import annotations

import pytest

from services.scheduler.domain.effects import LoadEnded, PublishLoadFailed, SendRelease, StepDown
from services.scheduler.domain.events import StartRefused
from services.scheduler.domain.lifecycle.failures import MAX_KILLED
from services.scheduler.domain.state.accounting import booking_of
from shared.contracts.node import InstanceState
from shared.errors import CheckpointInvalid, EngineFailed, EngineKilled, Unreachable
from tests.support.fake_node import MIB
from tests.unit.scheduler.fake_agents import no_room
from tests.unit.scheduler.world import World


def test_failed_start_is_retried_once_on_another_node(w: World) -> None:
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


@pytest.mark.parametrize("is_start", [True, False], ids=["start", "ready"])
def test_failed_instance_is_replaced_in_its_own_memory(w: World, is_start: bool) -> None:
    """The next start waits for the memory of a failed instance, and evicts no other model."""
    w.node("n1", budget=800 * MIB)
    w.model("idle", weights=150 * MIB)
    w.model("a", weights=150 * MIB)
    w.up("idle")
    w.demand("a")
    if not is_start:
        w.get_ready("a")
    w.fail("a", EngineFailed("boom").body(), is_ending=True)
    w.tick(0.01)
    w.demand("a")
    assert len(w.starts("a")) == 1, "the memory is not free yet"
    w.finish_stops()
    assert len(w.starts("a")) == 2
    assert not w.stops("idle")


def test_memory_of_a_failed_process_that_does_not_end_is_waited_for_with_a_bound(w: World) -> None:
    """A process that hangs in its driver survives SIGKILL."""
    w.node("n1", budget=800 * MIB)
    w.model("idle", weights=150 * MIB)
    w.model("a", weights=150 * MIB)
    idle = w.up("idle")
    w.demand("a")
    w.fail("a", EngineFailed("boom").body(), is_ending=True)
    for _ in range(int(w.policy.stuck_after_s)):
        w.demand("a")
        w.tick(1)
    assert not w.stops("idle")
    w.tick(1)
    assert len(w.stops("idle")) == 1
    idle.state = InstanceState.STOPPED
    w.report()
    assert len(w.starts("a")) == 2


def test_model_that_waits_for_a_failed_process_that_does_not_end_names_it(w: World) -> None:
    w.node("n1", budget=400 * MIB)
    w.model("a", weights=150 * MIB)
    w.demand("a")
    (failed,) = w.starts("a")
    w.fail("a", EngineFailed("boom").body(), is_ending=True)
    for _ in range(int(w.policy.stuck_after_s) + 2):
        w.tick(1)
        w.demand("a")
    plan = w.state.last_plan_of("a")
    assert plan is not None
    assert plan.way == "wait"
    assert plan.reason.endswith(f"should have ended, but still holds memory: {failed.command.instance_id}")
    w.finish_stops()
    assert len(w.starts("a")) == 2


def test_model_is_evicted_for_a_start_that_lacked_shared_memory(w: World) -> None:
    """Its own memory does not help the next start: the host's is used by the other model."""
    w.node("n1", budget=800 * MIB)
    w.model("idle", weights=150 * MIB)
    w.model("a", weights=150 * MIB)
    w.up("idle")
    w.demand("a")
    w.fail("a", no_room(None), is_ending=True)
    w.demand("a")
    assert w.stops("idle")


def test_model_is_evicted_if_a_failed_instance_keeps_too_little(w: World) -> None:
    w.node("n1", budget=800 * MIB)
    w.model("idle", weights=150 * MIB)
    w.model("a", weights=150 * MIB)
    w.model("larger", weights=350 * MIB)
    w.up("idle")
    w.demand("a")
    w.fail("a", CheckpointInvalid("shape of lm_head").body(), is_ending=True)
    w.demand("larger")
    assert w.stops("idle")


def test_start_whose_engine_was_killed_is_retried_more_often(w: World) -> None:
    """A start whose engine was killed is retried more often.

    Chaos seed 2: an engine host that was killed twice while it started had its waiting requests
    fail.
    """
    w.node("n1")
    w.model("a")
    w.demand("a")
    for tried in range(1, MAX_KILLED):
        w.fail("a", EngineKilled("killed by signal 9").body())
        assert len(w.starts("a")) == tried + 1
        assert not w.sent(PublishLoadFailed)
    w.fail("a", EngineKilled("killed again").body())
    (failed,) = w.sent(PublishLoadFailed)
    assert failed.event.error.message == "killed again"


def test_killed_starts_do_not_excuse_other_failures(w: World) -> None:
    w.node("n1")
    w.model("a")
    w.demand("a")
    w.fail("a", EngineKilled("killed by signal 9").body())
    w.fail("a", EngineFailed("boom").body())
    assert not w.sent(PublishLoadFailed)
    w.fail("a", EngineFailed("boom").body())
    assert w.sent(PublishLoadFailed)


def test_invalid_model_fails_its_requests_immediately(w: World) -> None:
    w.node()
    w.model("a")
    w.demand("a")
    w.fail("a", CheckpointInvalid("shape of lm_head").body())
    assert len(w.starts("a")) == 1
    assert w.sent(PublishLoadFailed)[0].event.error.code == "checkpoint_invalid"
    w.demand("a", oldest_wait_ms=500)
    assert len(w.starts("a")) == 1, "those waiters are being answered"
    w.now += 0.1
    w.demand("a", oldest_wait_ms=0)
    assert len(w.starts("a")) == 2, "the next request may try again"


def test_a_refused_reservation_is_placed_again(w: World) -> None:
    w.node("n1")
    w.model("a")
    agent = w.agents.pop("n1")  # it receives nothing
    w.demand("a")
    w.agents["n1"] = agent
    w.send(StartRefused(w.now, w.starts("a")[0].command.instance_id, no_room()))
    assert len(w.sent(SendRelease)) == 1
    assert len(w.starts("a")) == 1
    w.tick(1.1)
    assert len(w.starts("a")) == 2
    assert not w.sent(PublishLoadFailed)


def test_unreachable_node_counts_as_a_failed_start(w: World) -> None:
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
    booked = booking_of(w.state, start.node, "cpu:0")
    assert booked.held_bytes == 324 * MIB, "its bytes are not free before it is gone"
    agent.finish_stops()
    w.agents["n2"].finish_stops()
    w.get_ready()
    assert w.demand("a").outlook == "ready"
    assert len(w.starts("a")) == 2
