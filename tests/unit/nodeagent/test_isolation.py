"""Which instances share a process, and what follows for their ends."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.nodeagent.domain import events as e
from services.nodeagent.domain import isolation
from services.nodeagent.domain.state import Process
from shared.contracts.node import InstanceState, StartInstance
from shared.errors import MemoryExceeded
from tests.unit.nodeagent.shared_instances import shared
from tests.unit.nodeagent.world import ERROR, World, report, start, stop


def ready(world: World, instance_id: str, pid: int) -> None:
    world.receive(e.StartCommand(shared(instance_id), 1))
    world.receive(e.EngineForked(instance_id, pid, 123))
    world.receive(e.EngineReported(report(instance_id, "ready", pid)))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (shared(), True),
        (start(), False),
        (shared(trust_remote_code=True), False),
        (shared(engine="vllm"), False),
        (shared().model_copy(update={"device_ids": ("cpu:0", "cpu:1")}), False),
    ],
)
def test_only_builtin_models_without_own_code_that_ask_for_it_share(command: StartInstance, expected: bool) -> None:
    world = World("cpu:0", "cpu:1")
    world.receive(e.StartCommand(command, 1))
    assert world["i"].is_shared is expected


def test_model_that_crashed_its_executor_twice_gets_a_process_of_its_own() -> None:
    world = World()
    for turn in range(3):
        culprit, other = f"culprit{turn}", f"other{turn}"
        ready(world, culprit, 7 + turn)
        assert world[culprit].is_shared is (turn < 2)
        if turn < 2:
            world.receive(e.StartCommand(shared(other, source="/other", name="other"), 1))
            world.receive(e.EngineForked(other, 7 + turn, 123))
            for name in (culprit, other):
                world.receive(e.EngineExited(name, 7 + turn, -11, ERROR, culprit))
                assert world[name].state is InstanceState.FAILED
                world.receive(e.MemoryFreed(name, 0))
                world.receive(e.WeightsReleased(name, 0))
    world.receive(e.StartCommand(shared("bystander", source="/other", name="other"), 1))
    assert world["bystander"].is_shared, "it was not the one that computed"


def test_drained_shared_instance_is_detached_at_once() -> None:
    world = World()
    ready(world, "i", 7)
    world.receive(e.StopCommand(stop(), 2))
    effects = world.receive(e.EngineReported(report("i", "stopped")))
    assert e.Signal("i", "term") in effects
    world.receive(e.EngineExited("i", 7, 0, ERROR))
    assert world["i"].process is Process.GONE
    assert world["i"].error is None


def crashes_of(effects: tuple[e.Effect, ...]) -> list[int]:
    return [n for effect in effects if isinstance(effect, e.PersistCrashes) for n in effect.crashes.values()]


def test_crashes_are_recorded_and_a_step_that_did_not_end_counts_for_all() -> None:
    world = World()
    ready(world, "i", 7)
    assert crashes_of(world.receive(e.EngineExited("i", 7, -11, ERROR, "i"))) == [1]
    world = World()
    ready(world, "i", 7)
    assert crashes_of(world.receive(e.EngineExited("i", 7, -9, ERROR, "i", is_stuck=True))) == [isolation.MAX_CRASHES]
    world.receive(e.MemoryFreed("i", 0))
    world.receive(e.WeightsReleased("i", 0))
    world.receive(e.StartCommand(shared("again"), 1))
    assert not world["again"].is_shared


def test_model_that_exceeded_its_executors_memory_gets_a_process_of_its_own() -> None:
    world = World()
    ready(world, "i", 7)
    exceeded = report("i", "failed").model_copy(update={"error": MemoryExceeded().body()})
    assert crashes_of(world.receive(e.EngineReported(exceeded))) == [isolation.MAX_CRASHES]
    assert crashes_of(world.receive(e.EngineReported(exceeded))) == [], "it is counted once"


@pytest.mark.parametrize(
    ("returncode", "is_fault", "expected"),
    [
        (-signal.SIGSEGV, False, True),
        (-signal.SIGABRT, False, True),
        (1, False, True),
        (-signal.SIGKILL, False, False),
        (-signal.SIGTERM, False, False),
        (-signal.SIGKILL, True, True),
        (None, False, False),
        (None, True, True),
    ],
)
def test_only_a_fault_of_the_executor_itself_counts_for_the_model_that_computed(
    returncode: int | None, is_fault: bool, expected: bool
) -> None:
    world = World()
    ready(world, "i", 7)
    assert bool(crashes_of(world.receive(e.EngineExited("i", 7, returncode, ERROR, "i", is_fault=is_fault)))) is expected
    assert world["i"].state is InstanceState.FAILED


def test_executor_that_was_killed_while_there_was_no_agent_counts_for_no_model() -> None:
    world = World()
    ready(world, "i", 7)
    instance, world.state = world["i"], replace(world.state, instances={})
    assert crashes_of(world.receive(e.Adopted(instance, False, ERROR, culprit="i"))) == []


def test_crash_while_there_was_no_agent_is_counted_at_adoption() -> None:
    world = World()
    ready(world, "i", 7)
    instance, state = world["i"], replace(world.state, instances={}, crashes={"demo@r": 1})
    world.state = state
    assert crashes_of(world.receive(e.Adopted(instance, False, ERROR, culprit="i", is_fault=True))) == [2]
    world.state = state
    assert crashes_of(world.receive(e.Adopted(instance, False, ERROR, culprit="other", is_fault=True))) == []


def test_counts_of_the_models_that_crashed_last_are_kept() -> None:
    world = World()
    ready(world, "i", 7)
    world.state = replace(world.state, crashes={f"m{n}@r": 1 for n in range(2000)})
    world.receive(e.EngineExited("i", 7, -11, ERROR, "i"))
    assert len(world.state.crashes) == 1024
    assert world.state.crashes["demo@r"] == 1


OTHER = shared(source="/other", name="other").card


def with_executor(instance_id: str, reserve: int = 20, executor: int = 50) -> StartInstance:
    return shared(instance_id).model_copy(update={"reserve_bytes": reserve, "executor_bytes": executor})


def detach(world: World, instance_id: str, pid: int = 7) -> None:
    world.receive(e.StopCommand(stop(instance_id, drain_timeout_ms=0), 1))
    world.receive(e.EngineExited(instance_id, pid, 0, ERROR, is_detached=True))
    world.receive(e.MemoryFreed(instance_id, 0))
    world.receive(e.WeightsReleased(instance_id, 0))


def attach(world: World, instance_id: str, pid: int) -> None:
    world.receive(e.StartCommand(with_executor(instance_id, reserve=10), 1))
    world.receive(e.EngineForked(instance_id, pid, 123))
    world.receive(e.EngineReported(report(instance_id, "ready", pid)))


def crash(world: World, instance_id: str, pid: int, status: int) -> None:
    world.receive(e.EngineExited(instance_id, pid, status, ERROR))
    world.receive(e.MemoryFreed(instance_id, 0))
    world.receive(e.WeightsReleased(instance_id, 0))


@pytest.mark.parametrize("status", [0, -signal.SIGKILL])
def test_executor_that_has_exited_is_not_booked_any_more(status: int) -> None:
    """An executor that an operator ends by SIGTERM has exit status 0."""
    world = World()
    attach(world, "a", 7)
    crash(world, "a", 7, status)
    assert world.state.ledger.sum_reserved("cpu:0") == 0


def test_late_exit_of_an_executor_leaves_the_next_one_booked() -> None:
    world = World()
    attach(world, "a", 7)
    attach(world, "b", 7)
    crash(world, "a", 7, -9)
    attach(world, "c", 8)
    crash(world, "b", 7, -9)
    detach(world, "c", 8)
    assert world.state.ledger.sum_reserved("cpu:0") == 50, "the executor of c runs"


def test_executor_is_booked_once_and_while_it_runs() -> None:
    world = World()
    for name in ("a", "b"):
        world.receive(e.StartCommand(with_executor(name), 1))
        world.receive(e.EngineForked(name, 7, 123))
        world.receive(e.EngineReported(report(name, "ready", 7)))
    assert world.state.ledger.sum_reserved("cpu:0") == 50 + 2 * 20
    for name in ("a", "b"):
        detach(world, name)
    assert world.state.ledger.sum_reserved("cpu:0") == 50, "it runs without an instance"
    world.receive(e.StartCommand(with_executor("c"), 1))
    assert world.state.ledger.sum_reserved("cpu:0") == 50 + 20
    world.receive(e.EngineForked("c", 7, 123))
    world.receive(e.EngineExited("c", 7, -9, ERROR))
    assert world.state.ledger.sum_reserved("cpu:0") == 50 + 20, "its memory is not verified free yet"
    world.receive(e.MemoryFreed("c", 0))
    world.receive(e.WeightsReleased("c", 0))
    assert world.state.ledger.sum_reserved("cpu:0") == 0


def test_instance_that_needs_the_first_executor_needs_room_for_both() -> None:
    world = World()
    world.receive(e.StartCommand(with_executor("big", reserve=51), 1))
    assert world.find("big") is None
    world.receive(e.StartCommand(with_executor("fits", reserve=50), 1))
    assert world["fits"].booked


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(("start", "detach", "crash"))), max_size=25))
def test_bookings_are_the_instances_and_one_executor_at_any_time(steps: list[tuple[str, str]]) -> None:
    world, number = World(), 0
    names: dict[str, str] = {}
    for slot, step in steps:
        live = {s: n for s, n in names.items() if (i := world.find(n)) is not None and i.ended_at is None}
        if step == "start" and slot not in live:
            number += 1
            names[slot] = f"{slot}{number}"
            world.receive(e.StartCommand(with_executor(names[slot]), 1))
            world.receive(e.EngineForked(names[slot], 7, 123))
            world.receive(e.EngineReported(report(names[slot], "ready", 7)))
        elif step == "detach" and slot in live:
            detach(world, live[slot])
        elif step == "crash":
            for name in live.values():
                world.receive(e.EngineExited(name, 7, -9, ERROR))
                world.receive(e.MemoryFreed(name, 0))
                world.receive(e.WeightsReleased(name, 0))
        ledger = world.state.ledger
        instances = sum(b.bytes_each for b in ledger.bookings.values())
        assert ledger.sum_reserved("cpu:0") - instances == (50 if ledger.bookings else ledger.executors.get("cpu:0", 0))
        assert ledger.sum_reserved("cpu:0") <= 100


def test_model_that_lost_its_executor_reserves_a_process_beside_it() -> None:
    world = World()
    world.receive(e.StartCommand(with_executor("other", reserve=5, executor=40).model_copy(update={"card": OTHER}), 1))
    world.receive(e.EngineForked("other", 7, 123))
    world.state = replace(world.state, crashes={"demo@r": isolation.MAX_CRASHES})
    world.receive(e.StartCommand(with_executor("own", reserve=5, executor=40), 1))
    assert not world["own"].is_shared
    assert world.state.ledger.bookings["own"].bytes_each == 45
    assert world.state.ledger.sum_reserved("cpu:0") == 40 + 5 + 45
