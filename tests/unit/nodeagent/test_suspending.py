"""One test for each numbered branch of suspending."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.nodeagent.domain import events as e
from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.resuming import has_to_serve_again
from services.nodeagent.domain.state import Outlook
from services.nodeagent.domain.status import suspension
from services.nodeagent.domain.suspending import LOST_ANSWER_S
from shared.contracts.base import ErrorBody
from shared.contracts.engine import EngineLoad
from shared.contracts.node import InstanceState, SuspendWay
from shared.errors import DeadlineExceeded, EngineFailed, InstanceBusy, StaleToken, ThawError, Unreachable
from tests.unit.nodeagent.world import EPOCH, ERROR, POSSIBLE, World, report, resume, start, suspend

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


# Suspending.


def test_1_a_stale_suspension_is_refused(w: World) -> None:
    w.ready(token=EPOCH + 5)
    assert code(w.receive(e.SuspendCommand(suspend(token=EPOCH), 2))) == StaleToken.code


def test_2_suspend_of_an_unknown_or_suspended_instance_is_a_no_op(w: World) -> None:
    assert code(w.receive(e.SuspendCommand(suspend("unknown"), 2))) is None
    w.suspended()
    effects = w.receive(e.SuspendCommand(suspend(), 3))
    assert code(effects) is None
    assert not [x for x in effects if isinstance(x, e.PauseEngine | e.Suspend)]


def test_3_a_second_suspension_can_only_shorten_the_drain(w: World) -> None:
    w.ready()
    w.receive(e.SuspendCommand(suspend(drain_timeout_ms=60_000), 2))
    w.receive(e.SuspendCommand(suspend(drain_timeout_ms=1_000), 3))
    w.receive(e.SuspendCommand(suspend(drain_timeout_ms=90_000), 4))
    assert w["i"].drain_until == w.now + 1.0


def just_ready(w: World) -> None:
    w.receive(e.StartCommand(start(), 1))
    w.receive(e.EngineForked("i", 7, 1))
    assert e.Assess("i") in w.receive(e.EngineReported(report()), after=5.0)


def test_4_suspend_waits_for_the_assessment(w: World) -> None:
    """An instance asked to make room once it is ready waits for its assessment.

    An unknown capability does not count as missing.
    """
    just_ready(w)
    assert not w.receive(e.SuspendCommand(suspend(), 2))
    effects = w.receive(e.Assessed("i", POSSIBLE, 60))
    assert replies(effects) == [None]
    assert e.PauseEngine("i", only_if_idle=False) in effects
    assert not w.state.deferred_suspends


def test_4_instance_assessed_as_impossible_to_suspend_is_stopped(w: World) -> None:
    just_ready(w)
    w.receive(e.SuspendCommand(suspend(), 2))
    effects = w.receive(e.Assessed("i", Outlook(reason="no swap"), 60))
    assert replies(effects) == [None]
    assert w["i"].stop_asked


def test_4_engine_exit_before_the_assessment_answers_the_suspend(w: World) -> None:
    just_ready(w)
    w.receive(e.SuspendCommand(suspend(), 2))
    assert replies(w.receive(e.EngineExited("i", 7, 1, ERROR))) == [None]
    assert not w.state.deferred_suspends


def test_4_newer_resume_overrides_a_waiting_suspend(w: World) -> None:
    just_ready(w)
    w.receive(e.SuspendCommand(suspend(), 2))
    w.receive(e.ResumeCommand(resume(token=EPOCH + 1), 3))
    assert code(w.receive(e.Assessed("i", POSSIBLE, 60))) == StaleToken.code
    assert w["i"].state is READY


@pytest.mark.parametrize("only_if_idle", [False, True])
def test_4_resuming_instance_is_suspended_again_once_ready(w: World, *, only_if_idle: bool) -> None:
    """An instance that is resuming is suspended again once it is ready.

    Ending it would lose an engine that takes a minute to start, for a fraction of a second.
    """
    w.suspended()
    w.receive(e.ResumeCommand(resume(), 3))
    assert not w.receive(e.SuspendCommand(suspend(only_if_idle=only_if_idle), 4))
    assert e.Assess("i", 0.0) in w.receive(e.Resumed("i", 60))
    assert e.PauseEngine("i", only_if_idle=only_if_idle) in w.receive(e.Assessed("i", POSSIBLE, 60))
    w.receive(e.PauseAnswered("i", only_if_idle))
    w.receive(e.Suspended("i", freed_bytes=50, left_bytes=10, used_bytes=60, snapshot_bytes=50))
    assert w["i"].state is SUSPENDED
    assert not w["i"].stop_asked


def test_4_deferred_suspend_is_answered_by_an_assessment_after_the_freeze(w: World) -> None:
    w.suspended()
    w.receive(e.ResumeCommand(resume(), 3))
    assert not w.receive(e.SuspendCommand(suspend(), 4))
    w.receive(e.Resumed("i", 60))
    w.receive(e.SuspendCommand(suspend(), 5))
    w.receive(e.PauseAnswered("i", False))
    assert replies(w.receive(e.Assessed("i", POSSIBLE, 60))) == [None]
    assert not w.state.deferred_suspends


def test_4_a_failed_resume_is_not_restarted_for_a_suspension(w: World) -> None:
    w.suspended()
    w.receive(e.ResumeCommand(resume(), 3))
    w.receive(e.SuspendCommand(suspend(), 4))
    w.receive(e.ResumeFailed("i", ERROR))
    effects = w.receive(e.EngineExited("i", 7, -9, ERROR))
    assert replies(effects) == [None]
    assert w["i"].stop_asked
    assert not w.state.deferred_suspends


@pytest.mark.parametrize(
    "outlook",
    [
        Outlook(reason="no swap"),
        POSSIBLE.model_copy(update={"snapshot_bytes": 121}),
        POSSIBLE.model_copy(update={"resume_s": 5.0}),
    ],
    ids=["no way", "over the budget", "no sooner than a cold start"],
)
def test_5_instance_that_cannot_be_suspended_is_stopped(w: World, outlook: Outlook) -> None:
    w.ready()
    w.receive(e.Assessed("i", outlook, 60))
    effects = w.receive(e.SuspendCommand(suspend(), 2))
    assert code(effects) is None
    assert [x for x in effects if isinstance(x, e.RequestDrain)]
    assert w["i"].stop_asked


def test_5_suspend_of_a_starting_instance_kills_it(w: World) -> None:
    w.receive(e.StartCommand(start(), 1))
    w.receive(e.EngineForked("i", 7, 1))
    effects = w.receive(e.SuspendCommand(suspend(), 2))
    assert e.Signal("i", "kill") in effects


def test_6_only_if_idle_the_engines_answer_is_the_reply(w: World) -> None:
    w.ready()
    assert replies(w.receive(e.SuspendCommand(suspend(only_if_idle=True), 2))) == []
    assert w["i"].state is READY
    assert code(w.receive(e.PauseAnswered("i", True, InstanceBusy().body()))) == InstanceBusy.code
    assert w["i"].state is READY
    w.receive(e.SuspendCommand(suspend(only_if_idle=True), 3))
    effects = w.receive(e.PauseAnswered("i", True))
    assert code(effects) is None
    assert e.Suspend("i", "cpu") in effects


def test_6_engine_whose_answer_is_lost_is_not_left_paused(w: World) -> None:
    """It would stay ready for gateways, and refuse every request."""
    w.ready()
    w.receive(e.SuspendCommand(suspend(only_if_idle=True), 2))
    effects = w.receive(e.PauseAnswered("i", True, DeadlineExceeded("no answer").body()))
    assert code(effects) == DeadlineExceeded.code
    assert e.Resume("i", None) in effects
    assert w.receive(e.Resumed("i", 60)) == (e.Persist("i"), e.Publish())
    assert w["i"].state is READY


def test_6_engine_that_does_not_serve_again_is_asked_once_more_and_replaced(w: World) -> None:
    """Its instance would stay ready for gateways; the engine refuses every request, or hangs."""
    w.ready()
    w.receive(e.SuspendCommand(suspend(only_if_idle=True), 2))
    w.receive(e.PauseAnswered("i", True, DeadlineExceeded("no answer").body()))
    effects = w.receive(e.ResumeFailed("i", ERROR))
    assert w["i"].state is RESUMING, "no route leads to it"
    assert effects.index(e.Persist("i")) < effects.index(e.Resume("i", None))
    assert e.Signal("i", "kill") in w.receive(e.ResumeFailed("i", ERROR))
    assert e.Fork("i") in w.receive(e.EngineExited("i", 7, -9, ERROR))


def test_6_engine_that_serves_again_when_asked_once_more_is_ready(w: World) -> None:
    w.ready()
    w.receive(e.SuspendCommand(suspend(only_if_idle=True), 2))
    w.receive(e.PauseAnswered("i", True, DeadlineExceeded("no answer").body()))
    w.receive(e.ResumeFailed("i", ERROR))
    w.receive(e.Resumed("i", 60))
    assert w["i"].state is READY
    assert not w.receive(e.ResumeFailed("i", ERROR)), "of no resume"


def test_6_a_pause_that_follows_a_failed_one_decides(w: World) -> None:
    """The engine is asked to pause again before its failure to serve again is known."""
    w.ready()
    w.receive(e.SuspendCommand(suspend(only_if_idle=True), 2))
    w.receive(e.PauseAnswered("i", True, DeadlineExceeded("no answer").body()))
    w.receive(e.SuspendCommand(suspend(only_if_idle=True), 3))
    assert not w.receive(e.ResumeFailed("i", ERROR))
    assert e.Suspend("i", "cpu") in w.receive(e.PauseAnswered("i", True))


def test_6_engine_has_to_serve_again_until_it_does_or_is_to_be_suspended(w: World) -> None:
    def after(event: e.Event) -> bool:
        w.receive(event)
        return has_to_serve_again(w.state, "i")

    w.ready()
    for command in (2, 3):
        assert not after(e.SuspendCommand(suspend(only_if_idle=True), command))
        assert after(e.PauseAnswered("i", True, DeadlineExceeded("no answer").body()))
        assert after(e.ResumeFailed("i", ERROR))
        assert not after(e.Resumed("i", 60))
    assert not after(e.SuspendCommand(suspend(only_if_idle=True), 4))
    assert after(e.PauseAnswered("i", True, DeadlineExceeded("no answer").body()))
    assert not after(e.SuspendCommand(suspend(only_if_idle=True), 5))
    assert not after(e.PauseAnswered("i", True))
    assert not after(e.Suspended("i", freed_bytes=50, left_bytes=10, used_bytes=60, snapshot_bytes=50))
    assert not after(e.ResumeCommand(resume(), 6)), "it is restored, not only unpaused"
    assert w["i"].state is RESUMING


def test_7_a_busy_engine_drains_first_and_is_frozen_when_idle(w: World) -> None:
    w.ready()
    w.receive(e.EngineReported(report(pid=7).model_copy(update={"load": EngineLoad(active=1)})))
    effects = w.receive(e.SuspendCommand(suspend(), 2))
    assert e.PauseEngine("i", only_if_idle=False) in effects
    assert w["i"].state is DRAINING
    assert not w.receive(e.PauseAnswered("i", False, InstanceBusy().body()))
    effects = w.receive(e.EngineReported(report(pid=7)))
    assert e.PauseEngine("i", only_if_idle=False) in effects
    effects = w.receive(e.PauseAnswered("i", False))
    assert effects.index(e.Persist("i")) < effects.index(e.Suspend("i", "cpu")), "recorded before it is frozen"


@pytest.mark.parametrize("lost", [DeadlineExceeded, Unreachable])
def test_7_a_pause_whose_answer_is_lost_is_asked_again(w: World, lost: type[ThawError]) -> None:
    """A busy machine delays an answer beyond its deadline: a stop would lose the engine."""
    w.ready()
    w.receive(e.SuspendCommand(suspend(), 2))
    assert not w.receive(e.PauseAnswered("i", False, lost("no answer").body()))
    assert e.PauseEngine("i", only_if_idle=False) in w.receive(e.EngineReported(report(pid=7)))
    assert e.Suspend("i", "cpu") in w.receive(e.PauseAnswered("i", False))


def test_7_engine_that_never_answers_a_pause_is_stopped_at_the_drain_deadline(w: World) -> None:
    w.ready()
    w.receive(e.SuspendCommand(suspend(drain_timeout_ms=1000), 2))
    w.receive(e.PauseAnswered("i", False, DeadlineExceeded("no answer").body()))
    assert e.Signal("i", "term") in w.receive(e.Tick(), 1.0)


def test_7_idle_engine_without_an_answer_is_stopped_before_the_drain_deadline(w: World) -> None:
    w.ready()
    w.receive(e.SuspendCommand(suspend(drain_timeout_ms=600_000), 2))
    lost = e.PauseAnswered("i", False, DeadlineExceeded("no answer").body())
    w.receive(lost)
    w.receive(e.EngineReported(report(pid=7)), 1.0)
    w.receive(lost, 3.0)
    assert not w.receive(e.Tick(), LOST_ANSWER_S - 4.5)
    assert e.Signal("i", "term") in w.receive(e.Tick(), 0.5)


def test_7_engine_that_cannot_pause_is_stopped(w: World) -> None:
    w.ready()
    w.receive(e.SuspendCommand(suspend(), 2))
    w.receive(e.PauseAnswered("i", False, ERROR))
    assert w["i"].stop_asked


def test_drain_timeout_turns_the_suspension_into_a_stop(w: World) -> None:
    w.ready()
    w.receive(e.EngineReported(report(pid=7).model_copy(update={"load": EngineLoad(active=1)})))
    w.receive(e.SuspendCommand(suspend(drain_timeout_ms=1000), 2))
    assert e.Signal("i", "term") in w.receive(e.Tick(), 1.0)
    w.receive(e.EngineExited("i", 7, -15, ERROR))
    assert w["i"].state is DRAINING, "asked to go: not failed"


def test_engine_that_cannot_be_paused_is_stopped(w: World) -> None:
    w.ready()
    w.receive(e.SuspendCommand(suspend(), 2))
    effects = w.receive(e.PauseAnswered("i", False, EngineFailed("what?").body()))
    assert [x for x in effects if isinstance(x, e.RequestDrain)]
    assert w["i"].stop_asked


def test_only_bytes_verified_as_freed_are_released(w: World) -> None:
    w.ready()
    w.receive(e.SuspendCommand(suspend(), 2))
    w.receive(e.PauseAnswered("i", False))
    assert w.state.ledger.sum_reserved("cpu:0") == 60
    w.receive(e.Suspended("i", freed_bytes=45, left_bytes=15, used_bytes=60, snapshot_bytes=45))
    assert w["i"].state is SUSPENDED
    assert w.state.ledger.sum_reserved("cpu:0") == 15
    assert w.state.snapshot_bytes == 45


def test_failed_suspension_becomes_a_stop(w: World) -> None:
    w.ready()
    w.receive(e.SuspendCommand(suspend(), 2))
    w.receive(e.PauseAnswered("i", False))
    effects = w.receive(e.SuspendFailed("i", ERROR))
    assert [x for x in effects if isinstance(x, e.RequestDrain)]
    assert w.state.ledger.sum_reserved("cpu:0") == 60


def test_engine_whose_suspension_does_not_end_is_killed(w: World) -> None:
    """The driver may hang, and the memory is promised to others."""
    w.ready()
    w.receive(e.SuspendCommand(suspend(), 2))
    w.receive(e.PauseAnswered("i", False))
    limit_s = w["i"].command.card.spec.init_timeout
    assert w["i"].suspends_until == w.now + limit_s
    assert w.receive(e.Tick(), after=limit_s - 1) == ()
    effects = w.receive(e.Tick(), after=1)
    assert e.Signal("i", "kill") in effects
    assert "did not end within" in suspension(w.state, w["i"]).reason
    w.receive(e.SuspendFailed("i", ERROR))
    w.receive(e.EngineExited("i", 7, -9, ERROR))
    w.receive(e.MemoryFreed("i", 60))
    w.receive(e.WeightsReleased("i", 0))
    assert w["i"].state is InstanceState.STOPPED
    assert w.state.ledger.sum_reserved("cpu:0") == 0


@pytest.mark.parametrize("is_suspended", [False, True])
def test_assessment_that_ends_after_the_freeze_is_dropped(w: World, is_suspended: bool) -> None:
    """It would change the way in which the engine is resumed, and book the memory that it had."""
    w.state = replace(w.state, ledger=Ledger({"cpu:0": 1 << 30}))
    w.ready()
    w.receive(e.SuspendCommand(suspend(), 2))
    w.receive(e.PauseAnswered("i", False))
    late = e.Assessed("i", Outlook(way="sleep", resume_s=0.01), 1 << 29)
    if not is_suspended:
        w.receive(late)
    w.receive(e.Suspended("i", freed_bytes=50, left_bytes=10, used_bytes=60, snapshot_bytes=50))
    if is_suspended:
        w.receive(late)
    assert w["i"].state is SUSPENDED
    assert w.state.ledger.sum_reserved("cpu:0") == 10
    assert e.Resume("i", "cpu") in w.receive(e.ResumeCommand(resume(), 3))


# The snapshot budget.


def test_the_coldest_snapshot_falls_to_stopped(w: World) -> None:
    for n, name in enumerate("abc"):
        w.suspended(name, pid=n + 1, left=1, reserve=40)
        w.now += 10
    assert w["a"].stop_asked
    assert [x for x in w.effects if isinstance(x, e.Signal)] == [e.Signal("a", "kill")]
    assert [w[x].state for x in "bc"] == [SUSPENDED, SUSPENDED]


def test_snapshot_over_the_budget_is_stopped(w: World) -> None:
    w.suspended(snapshot=121)
    assert w["i"].stop_asked


def test_coldest_snapshot_in_host_memory_is_spilled_first(w: World) -> None:
    two_snapshots(w, way="cuda")
    assert e.Spill("a", "cuda") in w.effects
    assert not w["a"].stop_asked
    w.receive(e.Spilled("a", freed_bytes=70))
    assert (w["a"].suspend_state.spilled, w["a"].suspend_state.snapshot_bytes) == ("written", 0)
    assert [(s.snapshot_bytes, s.swap_bytes) for s in (suspension(w.state, w[x]) for x in "ab")] == [(0, 70), (70, 0)]
    assert w.state.snapshot_bytes_except("") == 70


def test_snapshot_that_cannot_be_spilled_is_stopped(w: World) -> None:
    two_snapshots(w, way="cuda")
    w.receive(e.Spilled("a", error=ERROR))
    assert w["a"].stop_asked
    assert w["b"].state is SUSPENDED


def test_paged_out_snapshot_is_not_spilled(w: World) -> None:
    two_snapshots(w, way="cpu")
    assert not [x for x in w.effects if isinstance(x, e.Spill)]
    assert w["a"].stop_asked
    in_swap = suspension(w.state, w["b"])
    assert (in_swap.snapshot_bytes, in_swap.swap_bytes) == (70, 70)


def test_a_spilled_snapshot_resumes_and_can_be_spilled_again(w: World) -> None:
    two_snapshots(w, way="cuda")
    w.receive(e.ResumeCommand(resume("a"), 5))
    assert w["a"].state is RESUMING
    w.receive(e.Spilled("a", freed_bytes=70))  # reported too late
    assert w["a"].suspend_state.spilled == ""


def two_snapshots(w: World, way: SuspendWay) -> None:
    """Create two snapshots of 70 bytes on a node with a budget of 120; `a` is older."""
    w.state = replace(w.state, spills=True, ledger=Ledger({"cpu:0": 1000}))
    for name, pid in (("a", 7), ("b", 8)):
        w.ready(name, pid)
        w.receive(e.Assessed(name, POSSIBLE.model_copy(update={"way": way}), 60))
        w.receive(e.SuspendCommand(suspend(name), 2), after=1.0)
        w.receive(e.PauseAnswered(name, False))
        w.receive(e.Suspended(name, freed_bytes=50, left_bytes=10, used_bytes=60, snapshot_bytes=70))


def test_engine_that_is_suspended_before_its_first_report_to_a_new_agent_stays() -> None:
    """Its answer to the pause shows that it lives: a frozen engine reports nothing."""
    earlier, world = World(), World()
    world.receive(e.Adopted(earlier.ready(), alive=True, error=ERROR))
    world.suspended_again()
    world.receive(e.Tick(), after=60)
    assert world["i"].state is SUSPENDED
