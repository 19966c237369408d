"""An instance's life cycle, decision by decision."""

from __future__ import annotations

import pytest

from services.nodeagent.domain import events as e
from services.nodeagent.domain.ended_engines import KEPT, KEPT_S, add_ended, list_ended
from services.nodeagent.domain.state import Ended, Process, deadlines
from services.nodeagent.domain.status import instance_status
from shared.contracts.engine import EngineLoad
from shared.contracts.node import EndedEngine, InstanceState, InstanceStatus
from shared.engines.final_charges import FinalCharges
from shared.errors import InstanceBusy
from tests.unit.nodeagent.world import EPOCH, ERROR, World, report, start, stop


def loading(world: World, instance_id: str = "i", pid: int = 7) -> None:
    world.receive(e.StartCommand(start(instance_id), 1))
    world.receive(e.EngineForked(instance_id, pid, 123))
    world.receive(e.EngineReported(report(instance_id, "loading", pid)))


def ready(world: World, instance_id: str = "i", pid: int = 7) -> None:
    loading(world, instance_id, pid)
    world.receive(e.EngineReported(report(instance_id, "ready", pid)))
    world.effects.clear()


def ended(world: World, instance_id: str = "i") -> None:
    world.receive(e.MemoryFreed(instance_id, 10))
    world.receive(e.WeightsReleased(instance_id, 5))


def state(world: World) -> InstanceState:
    return world["i"].state


def status_of(world: World) -> InstanceStatus:
    return instance_status(world.state, world["i"], private=0, weights=0, phases=(), wall=0.0)


def errors(effects: tuple[e.Effect, ...]) -> list[str | None]:
    return [f.error.code if f.error else None for f in effects if isinstance(f, e.Reply)]


def test_a_start_is_recorded_before_the_fork_and_answered() -> None:
    effects = World().receive(e.StartCommand(start(), 1))
    kinds = [type(f).__name__ for f in effects]
    assert kinds == ["PersistEpoch", "Persist", "Publish", "Fork", "Reply"]


def test_states_follow_the_reports() -> None:
    world = World()
    world.receive(e.StartCommand(start(), 1))
    assert state(world) is InstanceState.PREPARING
    world.receive(e.EngineForked("i", 7, 123))
    world.receive(e.EngineReported(report(state="loading")))
    assert state(world) is InstanceState.LOADING
    world.receive(e.EngineReported(report(state="ready")))
    assert state(world) is InstanceState.READY


def test_memory_is_released_only_after_exit_and_weight_release() -> None:
    world = World()
    ready(world)
    world.receive(e.StopCommand(stop(), 2))
    assert state(world) is InstanceState.DRAINING
    world.receive(e.MemoryFreed("i", 10))  # too early: the process still runs
    world.receive(e.WeightsReleased("i", 5))
    assert world.state.ledger.sum_reserved("cpu:0") == 60
    effects = world.receive(e.EngineExited("i", 7, 0, ERROR))
    assert e.Release("i") in effects
    assert e.VerifyMemoryFreed("i") in effects
    world.receive(e.WeightsReleased("i", 5))
    assert world.state.ledger.sum_reserved("cpu:0") == 60
    world.receive(e.MemoryFreed("i", 10))
    assert world.state.ledger.sum_reserved("cpu:0") == 0
    assert state(world) is InstanceState.STOPPED
    assert world["i"].freed_bytes == 15


@pytest.mark.parametrize("has_failed", [False, True], ids=["stopped", "failed"])
def test_an_ended_instance_leaves_the_status_after_a_time_that_depends_on_its_end(has_failed: bool) -> None:
    """With many swaps the stopped ones would make up most of each status."""
    world = World()
    ready(world)
    if not has_failed:
        world.receive(e.StopCommand(stop(), 2))
    world.receive(e.EngineExited("i", 7, 1, ERROR))
    ended(world)
    policy = world.state.policy
    kept_s = policy.keep_failed_s if has_failed else policy.keep_stopped_s
    assert min(deadlines(world.state)) == world.now + kept_s
    world.receive(e.Tick(), after=kept_s - 0.1)
    assert state(world) is (InstanceState.FAILED if has_failed else InstanceState.STOPPED)
    assert e.Forget("i") in world.receive(e.Tick(), after=0.2)
    assert world.state.instances == {}
    assert deadlines(world.state) == []


def test_an_exit_is_published_before_the_memory_is_free() -> None:
    world = World()
    ready(world)
    world.receive(e.EngineExited("i", 7, -11, ERROR))
    assert state(world) is InstanceState.FAILED
    assert world["i"].error == ERROR
    assert world.state.ledger.sum_reserved("cpu:0") == 60
    ended(world)
    assert state(world) is InstanceState.FAILED
    assert world.state.ledger.sum_reserved("cpu:0") == 0


def test_exit_of_another_pid_is_ignored() -> None:
    world = World()
    ready(world)
    world.receive(e.EngineExited("i", 8, -9, ERROR))
    assert state(world) is InstanceState.READY


def test_stop_sends_sigterm_then_sigkill_until_exit() -> None:
    world = World()
    ready(world)
    assert e.RequestDrain("i", False, "") in world.receive(e.StopCommand(stop(drain_timeout_ms=1000), 2))
    assert world.receive(e.Tick(), after=0.9) == ()
    assert e.Signal("i", "term") in world.receive(e.Tick(), after=0.2)
    assert world.receive(e.Tick(), after=4.9) == ()
    assert e.Signal("i", "kill") in world.receive(e.Tick(), after=0.2)
    assert e.Signal("i", "kill") in world.receive(e.Tick(), after=5.1)


def test_engine_that_refuses_to_drain_is_terminated() -> None:
    world = World()
    ready(world)
    world.receive(e.StopCommand(stop(), 2))
    assert e.Signal("i", "term") in world.receive(e.DrainAnswered("i", False, ERROR))


def test_loading_engine_is_killed_immediately() -> None:
    world = World()
    loading(world)
    effects = world.receive(e.StopCommand(stop(), 2))
    assert e.Signal("i", "kill") in effects
    assert errors(effects) == [None]


def test_a_loading_engine_that_takes_requests_drains_once_it_has_some() -> None:
    world = World()
    loading(world)
    effects = world.receive(e.EngineReported(report(state="loading").model_copy(update={"accepts_requests": True})))
    assert e.Publish(is_awaited=True) in effects
    busy = report(state="loading").model_copy(update={"accepts_requests": True, "load": EngineLoad(waiting=1)})
    world.receive(e.EngineReported(busy))
    effects = world.receive(e.StopCommand(stop(), 2))
    assert e.RequestDrain("i", False, "") in effects
    assert not any(isinstance(f, e.Signal) for f in effects)


def test_stop_during_the_fork_is_carried_out_after_it() -> None:
    world = World()
    world.receive(e.StartCommand(start(), 1))
    assert not any(isinstance(f, e.Signal) for f in world.receive(e.StopCommand(stop(), 2)))
    assert e.Signal("i", "kill") in world.receive(e.EngineForked("i", 7, 1))


@pytest.mark.parametrize("busy", [True, False])
def test_conditional_stop_depends_on_the_engines_idle_reply(busy: bool) -> None:
    world = World()
    ready(world)
    assert errors(world.receive(e.StopCommand(stop(only_if_idle=True), 2))) == []
    assert state(world) is InstanceState.READY
    answer = InstanceBusy().body() if busy else None
    assert errors(world.receive(e.DrainAnswered("i", True, answer))) == (["instance_busy"] if busy else [None])
    assert state(world) is (InstanceState.READY if busy else InstanceState.DRAINING)


def test_engine_exit_answers_a_pending_conditional_stop() -> None:
    world = World()
    ready(world)
    world.receive(e.StopCommand(stop(only_if_idle=True), 2))
    assert errors(world.receive(e.EngineExited("i", 7, -9, ERROR))) == [None]
    assert world.receive(e.DrainAnswered("i", True, ERROR)) == ()


def test_start_without_memory_is_refused_and_its_weights_released() -> None:
    world = World()
    world.receive(e.StartCommand(start("a"), 1))
    effects = world.receive(e.StartCommand(start("b"), 2))
    assert errors(effects) == ["insufficient_memory"]
    assert e.Release("b") in effects
    assert set(world.state.instances) == {"a"}


def test_device_set_is_booked_completely_or_not_at_all() -> None:
    world = World("cuda:0", "cuda:1")
    world.receive(e.StartCommand(start("a", devices=("cuda:0",), reserve=80), 1))
    assert errors(world.receive(e.StartCommand(start("b", devices=("cuda:0", "cuda:1"), reserve=100), 2))) == [
        "insufficient_memory"
    ]
    assert world.state.ledger.sum_reserved("cuda:1") == 0
    world.receive(e.StartCommand(start("c", devices=("cuda:0", "cuda:1"), reserve=40), 3))
    assert (world.state.ledger.sum_reserved("cuda:0"), world.state.ledger.sum_reserved("cuda:1")) == (100, 20)


def test_stale_commands_are_refused() -> None:
    world = World()
    world.receive(e.StartCommand(start("a", token=3 * EPOCH + 5, reserve=10), 1))
    assert errors(world.receive(e.StopCommand(stop("a", token=3 * EPOCH + 4), 2))) == ["stale_token"]
    assert errors(world.receive(e.StartCommand(start("b", token=2 * EPOCH + 9), 3))) == ["stale_token"]
    assert errors(world.receive(e.StartCommand(start("b", token=3 * EPOCH + 1, reserve=10), 4))) == [None]
    assert errors(world.receive(e.StopCommand(stop("unknown", token=EPOCH), 5))) == ["stale_token"]


def test_repeated_start_changes_nothing() -> None:
    world = World()
    world.receive(e.StartCommand(start(), 1))
    effects = world.receive(e.StartCommand(start(), 2))
    assert errors(effects) == [None]
    assert not any(isinstance(f, e.Fork) for f in effects)


def test_an_instance_id_is_never_used_again() -> None:
    world = World()
    ready(world)
    world.receive(e.StopCommand(stop(), 2))
    assert errors(world.receive(e.StartCommand(start(), 3))) == ["conflict"]


def test_loaded_bytes_count_as_start_progress() -> None:
    world = World()
    loading(world)
    world.receive(e.LoaderReported({"i": 10}), after=90)
    world.receive(e.Tick(), after=90)
    assert state(world) is InstanceState.LOADING
    world.receive(e.LoaderReported({"i": 10}), after=5)  # no change
    effects = world.receive(e.Tick(), after=10)
    assert state(world) is InstanceState.FAILED
    assert e.Signal("i", "term") in effects


def test_repeated_reports_are_no_progress() -> None:
    world = World()
    loading(world)
    for _ in range(11):
        world.receive(e.EngineReported(report(state="loading")), after=10)
    world.receive(e.Tick())
    assert state(world) is InstanceState.FAILED


def test_weights_are_released_again_when_the_loader_is_back() -> None:
    world = World()
    ready(world)
    world.receive(e.StopCommand(stop(), 2))
    world.receive(e.EngineExited("i", 7, 0, ERROR))
    world.receive(e.MemoryFreed("i", 1))
    world.receive(e.ReleaseFailed("i", ERROR))
    assert world.state.ledger.sum_reserved("cpu:0") == 60
    assert e.Release("i") in world.receive(e.LoaderReported({}))
    world.receive(e.ReleaseFailed("i", ERROR))
    assert e.Release("i") in world.receive(e.Tick(), after=1.1)


def test_status_before_the_fork_reply_is_requested_again() -> None:
    world = World()
    world.receive(e.StartCommand(start(), 1))
    world.receive(e.EngineReported(report(state="loading")))
    assert e.Ping("i") in world.receive(e.EngineForked("i", 7, 1))


def test_an_unowned_engine_is_drained() -> None:
    assert [type(f) for f in World().receive(e.EngineReported(report("stray")))] == [e.RequestDrain]


def test_idle_engine_that_an_earlier_agent_stopped_has_not_failed() -> None:
    """Its answer, upon which the stop is recorded, was lost with that agent."""
    before = World()
    ready(before)
    before.receive(e.StopCommand(stop(only_if_idle=True), 2))
    world = World()
    world.receive(e.Adopted(before["i"], alive=True, error=ERROR))
    world.receive(e.EngineReported(report(state="draining")))
    world.receive(e.EngineExited("i", 7, None, ERROR))
    ended(world)
    assert state(world) is InstanceState.STOPPED


def test_engine_that_is_forked_after_its_start_has_failed_is_drained() -> None:
    """Its launcher was stopped for so long that it did not answer."""
    world = World()
    world.receive(e.StartCommand(start(), 1))
    world.receive(e.ForkFailed("i", ERROR))
    assert [type(f) for f in world.receive(e.EngineReported(report(state="loading", pid=9)))] == [e.RequestDrain]
    world.receive(e.DrainAnswered("i", False))
    assert world.receive(e.EngineReported(report(state="stopped", pid=9))) == ()
    assert state(world) is InstanceState.FAILED


def test_adopted_instance_is_reported_immediately_and_fails_on_silence() -> None:
    old, new = World(), World()
    ready(old)
    effects = new.receive(e.Adopted(old["i"], True, ERROR))
    assert state(new) is InstanceState.READY
    assert e.Ping("i") in effects
    assert new.state.ledger.sum_reserved("cpu:0") == 60
    effects = new.receive(e.Tick(), after=new.state.policy.adopt_s + 1)
    assert state(new) is InstanceState.FAILED
    assert e.Signal("i", "kill") in effects


def test_adopted_engine_that_responds_stays_ready() -> None:
    old, new = World(), World()
    ready(old)
    new.receive(e.Adopted(old["i"], True, ERROR))
    new.receive(e.EngineReported(report()))
    new.receive(e.Tick(), after=new.state.policy.adopt_s + 1)
    assert state(new) is InstanceState.READY


def test_silent_engines_are_not_ended_while_nats_does_not_answer_the_agent() -> None:
    old, new = World(), World()
    ready(old)
    new.receive(e.Adopted(old["i"], True, ERROR))
    assert new.receive(e.NatsProbed(True), after=3) == (e.Ping("i"),), "it has not reported"
    assert new.receive(e.NatsProbed(False), after=3) == ()
    new.receive(e.Tick(), after=new.state.policy.adopt_s - 1)
    assert state(new) is InstanceState.READY
    new.receive(e.Tick(), after=2)
    assert state(new) is InstanceState.FAILED, "NATS has answered, and the engine has not"


def test_an_engine_that_has_reported_is_not_asked_again() -> None:
    old, new = World(), World()
    ready(old)
    new.receive(e.Adopted(old["i"], True, ERROR))
    new.receive(e.EngineReported(report()))
    assert new.receive(e.NatsProbed(True)) == ()


def test_teardown_is_continued_by_the_next_nodeagent() -> None:
    old, new = World(), World()
    ready(old)
    old.receive(e.StopCommand(stop(), 2))
    old.receive(e.EngineExited("i", 7, 0, ERROR))
    old.receive(e.WeightsReleased("i", 5))
    new.receive(e.Adopted(old["i"], False, ERROR))
    assert new.state.ledger.sum_reserved("cpu:0") == 60
    new.receive(e.MemoryFreed("i", 10))
    assert state(new) is InstanceState.STOPPED
    assert new["i"].error is None


def test_shutdown_refuses_starts_and_drains() -> None:
    world = World()
    ready(world)
    effects = world.receive(e.Shutdown(3.0))
    assert e.RequestDrain("i", False, "the node is shutting down") in effects
    assert errors(world.receive(e.StartCommand(start("b", reserve=1), 5))) == ["shutting_down"]
    assert e.Signal("i", "term") in world.receive(e.Tick(), after=3.1)
    assert world["i"].process is Process.ALIVE


def test_a_holder_without_an_instance_is_released_after_a_while() -> None:
    world = World()
    ready(world)
    assert world.receive(e.LoaderReported({"i": 1, "late": 0})) == ()
    assert world.receive(e.LoaderReported({"i": 1, "late": 0}), after=10) == ()
    assert world.receive(e.LoaderReported({"i": 1, "late": 0}), after=25) == (e.Release("late"),)
    world.receive(e.LoaderReported({"i": 1}))
    assert world.state.stray_holders == {}


def test_engine_that_stops_during_its_start_leaves_no_deadline() -> None:
    """Found by the state machine: the kill and the start's own time-out passed together, and the
    loop spun.
    """
    world = World()
    loading(world)
    world.receive(e.EngineReported(report("i", "stopped", 7)))
    world.receive(e.Tick(), after=101)
    assert [t for t in deadlines(world.state) if t <= world.now] == []


ENDED = EndedEngine(instance_id="j", pid=8, model="m", device_kind="cpu", device_count=1, charged_s=1.0)
CHARGES = FinalCharges(busy_s=3.0, charged_s=2.5, own_s=0.5)


def test_the_meters_of_a_killed_engine_are_its_last_ones() -> None:
    world = World()
    ready(world)
    world.receive(e.EngineReported(report().model_copy(update={"load": EngineLoad(completed=2, busy_s=2.0, charged_s=1.0)})))
    world.receive(e.EngineExited("i", 7, -9, ERROR, charges=CHARGES))
    load = status_of(world).load
    assert (load.completed, load.busy_s, load.charged_s) == (2, 3.0, 2.5)
    assert [(work.plan_id, work.seconds) for work in load.background] == [("", 0.5)]
    shown = status_of(world)
    assert (shown.pids, shown.ended_pid) == ((), 7)


def test_an_engine_that_ended_without_a_nodeagent_is_metered_by_the_next_one() -> None:
    old, new = World(), World()
    ready(old)
    new.receive(e.Adopted(old["i"], False, ERROR, charges=CHARGES))
    assert status_of(new).load.charged_s == 2.5


def test_the_meters_of_an_ended_engine_are_kept_when_its_instance_is_forgotten() -> None:
    world = World()
    ready(world)
    world.receive(e.EngineExited("i", 7, -9, ERROR, charges=CHARGES))
    world.receive(e.MemoryFreed("i", 1))
    world.receive(e.WeightsReleased("i", 1))
    world.receive(e.Tick(), after=KEPT_S - 1)
    assert "i" not in world.state.instances
    (ended,) = list_ended(world.state.ended_engines, world.now)
    assert (ended.engine.instance_id, ended.engine.pid, ended.engine.charged_s) == ("i", 7, 2.5)
    assert (ended.engine.model, ended.engine.device_kind, ended.engine.device_count) == ("demo", "cpu", 1)
    assert list_ended(world.state.ended_engines, world.now, 1.0) == ()
    assert list_ended(world.state.ended_engines, world.now + 1) == ()


def test_an_engine_that_charged_nothing_is_not_kept_and_many_are_bounded() -> None:
    world = World()
    ready(world)
    known = tuple(Ended(float(n), ENDED) for n in range(KEPT))
    assert add_ended(known, world["i"], now=1.0) == known, "it has charged nothing"
    charged = world["i"].model_copy(update={"load": EngineLoad(charged_s=1.0)})
    found = add_ended(known, charged, now=float(KEPT))
    assert (len(found), found[0].at, found[-1].engine.instance_id) == (KEPT, 1.0, "i")
