"""One test for each numbered branch of resumption, its failures, and crashes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.nodeagent.domain import events as e
from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.reservations import PASSES
from services.nodeagent.domain.state import Instance, NodeState, Process
from services.nodeagent.domain.status import instance_status
from shared.contracts.base import ErrorBody
from shared.contracts.engine import EngineLoad
from shared.contracts.node import RESERVATION, InstanceState
from shared.engines.final_charges import FinalCharges
from shared.errors import DeadlineExceeded, EngineFailed, InstanceBusy, InsufficientMemory, NotFound, ThawError
from tests.unit.nodeagent.world import ERROR, POSSIBLE, World, report, resume, start, stop, suspend

READY, DRAINING, SUSPENDED = InstanceState.READY, InstanceState.DRAINING, InstanceState.SUSPENDED
RESUMING, FAILED, PREPARING = InstanceState.RESUMING, InstanceState.FAILED, InstanceState.PREPARING


@pytest.fixture
def w() -> World:
    return World()


def replies(effects: tuple[e.Effect, ...]) -> list[ErrorBody | None]:
    return [x.error for x in effects if isinstance(x, e.Reply)]


def code(effects: tuple[e.Effect, ...]) -> str | None:
    (error,) = replies(effects)
    return error.code if error else None


def test_a_resume_reserves_first_and_is_ready_when_proved(w: World) -> None:
    w.suspended()
    assert code(w.receive(e.ResumeCommand(resume(), 3))) is None
    assert w["i"].state is RESUMING
    assert w.state.ledger.sum_reserved("cpu:0") == 60
    assert e.Resume("i", "cpu") in w.effects
    w.receive(e.EngineReported(report(pid=7)))
    assert w["i"].state is RESUMING, "its own word does not count"
    w.receive(e.Resumed("i", 60), 0.2)
    assert w["i"].state is READY
    assert w["i"].suspend_state.resume_s == pytest.approx(0.2)
    assert w.state.snapshot_bytes == 0


def test_a_resume_without_room_is_refused(w: World) -> None:
    w.suspended()
    w.receive(e.StartCommand(start("j", reserve=80), 9))
    assert code(w.receive(e.ResumeCommand(resume(), 3))) == InsufficientMemory.code
    assert w["i"].state is SUSPENDED


def test_a_resume_may_wait_for_room(w: World) -> None:
    w.suspended()
    w.ready("j", pid=8, reserve=80)
    assert code(w.receive(e.ResumeCommand(resume(wait_ms=5000), 3))) is None
    assert w["i"].state is SUSPENDED
    w.receive(e.StopCommand(stop("j"), 4))
    w.receive(e.EngineExited("j", 8, 0, ERROR))
    w.receive(e.WeightsReleased("j", 1))
    effects = w.receive(e.MemoryFreed("j", 1))
    assert e.Resume("i", "cpu") in effects


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_reservation_of_a_suspended_instance_ends_with_its_process(w: World, is_forgotten: bool) -> None:
    w.suspended()
    w.ready("j", pid=8, reserve=80)
    w.receive(e.ResumeCommand(resume(wait_ms=600_000), 3))
    w.receive(e.EngineExited("i", 7, -9, ERROR))
    w.receive(e.WeightsReleased("i", 1))
    w.receive(e.MemoryFreed("i", 1))
    assert w["i"].state is FAILED
    if is_forgotten:
        w.receive(e.Tick(), w.state.policy.keep_failed_s)
    w.receive(e.StopCommand(stop("j"), 4))
    w.receive(e.EngineExited("j", 8, 0, ERROR))
    w.receive(e.WeightsReleased("j", 1))
    w.receive(e.MemoryFreed("j", 1))
    assert w.find("i") is None if is_forgotten else w["i"].state is FAILED
    assert not w.state.ledger.bookings


def test_2_resume_of_an_unknown_or_stopping_instance_is_not_found(w: World) -> None:
    assert code(w.receive(e.ResumeCommand(resume(), 3))) == NotFound.code
    w.suspended()
    w.receive(e.StopCommand(stop(), 4))
    assert code(w.receive(e.ResumeCommand(resume(), 5))) == NotFound.code


def test_3_concurrent_resumes_are_deduplicated(w: World) -> None:
    w.suspended()
    w.receive(e.ResumeCommand(resume(), 3))
    effects = w.receive(e.ResumeCommand(resume(), 4))
    assert code(effects) is None
    assert not [x for x in effects if isinstance(x, e.Resume)]


def test_4_resume_during_the_drain_cancels_the_suspension(w: World) -> None:
    w.ready()
    w.receive(e.SuspendCommand(suspend(), 2))
    effects = w.receive(e.ResumeCommand(resume(), 3))
    assert e.Resume("i", None) in effects
    assert not w.receive(e.PauseAnswered("i", False)), "the answer is too late"
    w.receive(e.Resumed("i", 60))
    assert w["i"].state is READY
    assert w["i"].suspend_state.resumes == 0


def test_stop_after_a_pause_that_was_called_off_drains_its_requests(w: World) -> None:
    w.ready()
    w.receive(e.EngineReported(report(pid=7).model_copy(update={"load": EngineLoad(active=1)})))
    w.receive(e.SuspendCommand(suspend(), 2))
    w.receive(e.ResumeCommand(resume(), 3))
    assert w["i"].state is RESUMING
    effects = w.receive(e.StopCommand(stop(), 4))
    assert [x for x in effects if isinstance(x, e.RequestDrain)]
    assert not [x for x in effects if isinstance(x, e.Signal)]
    assert w["i"].state is DRAINING


def test_5_resume_during_the_freeze_follows_the_suspension(w: World) -> None:
    w.ready()
    w.receive(e.SuspendCommand(suspend(), 2))
    w.receive(e.PauseAnswered("i", False))
    assert code(w.receive(e.ResumeCommand(resume(), 3))) is None
    effects = w.receive(e.Suspended("i", freed_bytes=50, left_bytes=10, used_bytes=60, snapshot_bytes=50))
    assert e.Resume("i", "cpu") in effects
    assert w["i"].state is RESUMING


def test_5_resume_without_room_after_the_freeze_reports_an_error(w: World) -> None:
    """A resume without room reports that in its status.

    The command was acknowledged already, so there is no other place.
    """
    w.ready()
    w.receive(e.StartCommand(start("large", reserve=80).model_copy(update={"wait_ms": 60_000}), 9))
    w.state = replace(w.state, queue=tuple(replace(q, passed=PASSES) for q in w.state.queue))
    w.receive(e.SuspendCommand(suspend(), 2))
    w.receive(e.PauseAnswered("i", False))
    assert code(w.receive(e.ResumeCommand(resume(), 3))) is None
    w.receive(e.Suspended("i", freed_bytes=50, left_bytes=10, used_bytes=60, snapshot_bytes=50))
    assert w["i"].state is SUSPENDED
    reported = instance_status(w.state, w["i"], private=10, weights=0, phases=(), wall=0.0).error
    assert reported is not None
    assert (reported.code, reported.param) == (InsufficientMemory.code, RESERVATION)


def test_5_resume_after_a_failed_freeze_continues_serving(w: World) -> None:
    w.ready()
    w.receive(e.SuspendCommand(suspend(), 2))
    w.receive(e.PauseAnswered("i", False))
    w.receive(e.ResumeCommand(resume(), 3))
    effects = w.receive(e.SuspendFailed("i", ERROR))
    assert e.Resume("i", None) in effects


# A restore that fails.


@pytest.mark.parametrize("dies", [False, True], ids=["refused", "died of it"])
def test_failed_restore_causes_one_cold_start(w: World, dies: bool) -> None:
    w.suspended()
    w.receive(e.ResumeCommand(resume(), 3))
    if not dies:
        assert e.Signal("i", "kill") in w.receive(e.ResumeFailed("i", EngineFailed("other tokens").body()))
    effects = w.receive(e.EngineExited("i", 7, -9, ERROR))
    assert e.Fork("i") in effects
    assert not [x for x in effects if isinstance(x, e.Release)], "its weights are wanted again"
    assert w["i"].state is PREPARING
    assert w["i"].process is Process.FORKING
    w.receive(e.EngineForked("i", 8, 1))
    w.receive(e.EngineReported(report(pid=8)))
    assert w["i"].state is READY
    reported = w["i"].suspend_state.fell_back
    assert reported is not None
    assert reported.message == ("it died" if dies else "other tokens")


def test_a_cold_start_after_a_failed_restore_is_not_repeated(w: World) -> None:
    w.suspended()
    w.receive(e.ResumeCommand(resume(), 3))
    w.receive(e.EngineExited("i", 7, -9, ERROR))
    w.receive(e.EngineForked("i", 8, 1))
    effects = w.receive(e.EngineExited("i", 8, 1, ERROR))
    assert e.Fork("i") not in effects
    assert w["i"].state is FAILED


def test_meters_of_an_engine_that_a_cold_start_follows_are_kept(w: World) -> None:
    w.suspended(left=10)
    w.receive(e.ResumeCommand(resume(), 3))
    effects = w.receive(e.EngineExited("i", 7, -9, ERROR, charges=FinalCharges(busy_s=3.0, charged_s=2.5, own_s=0.5)))
    assert e.Fork("i") in effects
    assert w["i"].load.charged_s is None, "the next process has charged nothing"
    assert [(x.engine.pid, x.engine.charged_s) for x in w.state.ended_engines] == [(7, 2.5)]


def test_cold_start_without_memory_after_a_failed_restore_fails(w: World) -> None:
    w.suspended(left=10)
    w.receive(e.ResumeCommand(resume(), 3))
    w.state = NodeState(
        w.state.ledger.set_booking("other", ("cpu:0",), 45).set_booking("i", ("cpu:0",), 50),
        w.state.policy,
        dict(w.state.instances),
    )
    w.receive(e.EngineExited("i", 7, -9, ERROR))
    assert w["i"].state is FAILED
    assert "a cold start has no memory" in (w["i"].error.message if w["i"].error else "")


def test_leaking_engine_is_stopped_instead_of_suspended(w: World) -> None:
    big = 1 << 30
    w.state = replace(w.state, ledger=Ledger({"cpu:0": 8 * big}))
    w.suspended()
    for used in (big, big, 2 * big):
        w.receive(e.ResumeCommand(resume(), 3))
        w.receive(e.Resumed("i", used), 0.1)
        w.receive(e.Assessed("i", POSSIBLE, used))
        if used == big:
            w.receive(e.SuspendCommand(suspend(), 2))
            w.receive(e.PauseAnswered("i", False))
            w.receive(e.Suspended("i", freed_bytes=50, left_bytes=10, used_bytes=60, snapshot_bytes=50))
            assert w["i"].state is SUSPENDED
    effects = w.receive(e.SuspendCommand(suspend(), 2))
    assert [x for x in effects if isinstance(x, e.RequestDrain)]


# A crash in any state, and a restart of the agent.


def adopt(w: World, **adopted: bool) -> World:
    """Start the next agent from the recorded state."""
    record = Instance.model_validate_json(w["i"].model_dump_json())
    new = World()
    new.now = w.now
    new.receive(e.Adopted(record, adopted.pop("alive", True), ERROR, adopted.pop("frozen", False)))
    return new


def test_death_of_a_suspended_engine_releases_its_memory(w: World) -> None:
    w.suspended()
    w.receive(e.EngineExited("i", 7, -9, ERROR))
    w.receive(e.WeightsReleased("i", 1))
    w.receive(e.MemoryFreed("i", 1))
    assert w["i"].state is FAILED
    assert w.state.ledger.bookings == {}
    assert w.state.snapshot_bytes == 0


@pytest.mark.parametrize(
    ("answer", "is_answered"),
    [(None, False), (DeadlineExceeded("no answer"), False), (InstanceBusy(), True)],
    ids=["asked", "asked to serve again", "answered"],
)
def test_a_new_agent_wakes_an_engine_that_may_have_paused(w: World, answer: ThawError | None, is_answered: bool) -> None:
    """The engine reports that it is ready, and would refuse every request."""
    w.ready()
    effects = w.receive(e.SuspendCommand(suspend(only_if_idle=True), 2))
    assert effects.index(e.Persist("i")) < effects.index(e.PauseEngine("i", only_if_idle=True)), "recorded before it is asked"
    if answer is not None:
        w.receive(e.PauseAnswered("i", True, answer.body()))
    new = adopt(w)
    assert (e.Resume("i", None) in new.effects) is not is_answered
    if not is_answered:
        assert new["i"].state is RESUMING
        new.receive(e.Resumed("i", 60))
    assert new["i"].state is READY
    assert adopt(new)["i"].state is READY


def test_a_new_agent_finds_a_suspended_engine_suspended(w: World) -> None:
    w.suspended()
    new = adopt(w, frozen=True)
    assert new["i"].state is SUSPENDED
    assert new.state.ledger.sum_reserved("cpu:0") == 10
    assert not [x for x in new.effects if isinstance(x, e.Ping)], "it cannot answer"
    new.receive(e.ResumeCommand(resume(), 3))
    assert new["i"].state is RESUMING


@pytest.mark.parametrize("stage", ["held", "freezing", "suspended, thawed by another process", "resuming"])
def test_new_nodeagent_resumes_a_half_suspended_engine(w: World, stage: str) -> None:
    w.ready()
    w.receive(e.SuspendCommand(suspend(), 2))
    if stage != "held":
        w.receive(e.PauseAnswered("i", False))
    if stage in ("suspended, thawed by another process", "resuming"):
        w.receive(e.Suspended("i", freed_bytes=50, left_bytes=10, used_bytes=60, snapshot_bytes=50))
    if stage == "resuming":
        w.receive(e.ResumeCommand(resume(), 3))
    new = adopt(w, frozen=stage == "freezing")
    assert new["i"].state is RESUMING
    assert new.state.ledger.sum_reserved("cpu:0") == 60
    assert [x for x in new.effects if isinstance(x, e.Resume)] == [e.Resume("i", None if stage == "held" else "cpu")]


def test_suspended_engine_is_killed_without_a_drain(w: World) -> None:
    w.suspended()
    effects = w.receive(e.StopCommand(stop(), 4))
    assert e.Signal("i", "kill") in effects
    assert not [x for x in effects if isinstance(x, e.RequestDrain)]


def test_parked_start_is_suspended_as_soon_as_it_is_ready(w: World) -> None:
    w.receive(e.StartCommand(start().model_copy(update={"park": True}), 1))
    w.receive(e.EngineForked("i", 7, 1))
    w.receive(e.EngineReported(report(pid=7)), 5.0)
    effects = w.receive(e.Assessed("i", POSSIBLE, 60))
    assert e.PauseEngine("i", only_if_idle=False) in effects
