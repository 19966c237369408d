"""Which instances share a process, and what follows for their ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.nodeagent.domain import events as e
from services.nodeagent.domain import isolation
from services.nodeagent.domain.state import Process
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, StartInstance
from shared.errors import MemoryExceeded
from tests.unit.nodeagent.world import CARD, ERROR, World, report, start, stop


def shared(instance_id: str = "i", **spec: object) -> StartInstance:
    card = ModelCard(spec=CARD.spec.model_copy(update={"isolation": "shared", **spec}), info=CARD.info, created=0)
    return start(instance_id, reserve=10).model_copy(update={"card": card})


def ready(world: World, instance_id: str, pid: int) -> None:
    world.hear(e.StartCommand(shared(instance_id), 1))
    world.hear(e.EngineForked(instance_id, pid, 123))
    world.hear(e.EngineReported(report(instance_id, "ready", pid)))


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
    world.hear(e.StartCommand(command, 1))
    assert world["i"].is_shared is expected


def test_model_that_crashed_its_executor_twice_gets_a_process_of_its_own() -> None:
    world = World()
    for turn in range(3):
        culprit, other = f"culprit{turn}", f"other{turn}"
        ready(world, culprit, 7 + turn)
        assert world[culprit].is_shared is (turn < 2)
        if turn < 2:
            world.hear(e.StartCommand(shared(other, source="/other", name="other"), 1))
            world.hear(e.EngineForked(other, 7 + turn, 123))
            for name in (culprit, other):
                world.hear(e.EngineExited(name, 7 + turn, -11, ERROR, culprit))
                assert world[name].state is InstanceState.FAILED
                world.hear(e.MemoryFreed(name, 0))
                world.hear(e.WeightsReleased(name, 0))
    world.hear(e.StartCommand(shared("bystander", source="/other", name="other"), 1))
    assert world["bystander"].is_shared, "it was not the one that computed"


def test_drained_shared_instance_is_detached_at_once() -> None:
    world = World()
    ready(world, "i", 7)
    world.hear(e.StopCommand(stop(), 2))
    effects = world.hear(e.EngineReported(report("i", "stopped")))
    assert e.Signal("i", "term") in effects
    world.hear(e.EngineExited("i", 7, 0, ERROR))
    assert world["i"].process is Process.GONE
    assert world["i"].error is None


def crashes_of(effects: tuple[e.Effect, ...]) -> list[int]:
    return [n for effect in effects if isinstance(effect, e.PersistCrashes) for n in effect.crashes.values()]


def test_crashes_are_recorded_and_a_step_that_did_not_end_counts_for_all() -> None:
    world = World()
    ready(world, "i", 7)
    assert crashes_of(world.hear(e.EngineExited("i", 7, -11, ERROR, "i"))) == [1]
    world = World()
    ready(world, "i", 7)
    assert crashes_of(world.hear(e.EngineExited("i", 7, -9, ERROR, "i", is_stuck=True))) == [isolation.MAX_CRASHES]
    world.hear(e.MemoryFreed("i", 0))
    world.hear(e.WeightsReleased("i", 0))
    world.hear(e.StartCommand(shared("again"), 1))
    assert not world["again"].is_shared


def test_model_that_exceeded_its_executors_memory_gets_a_process_of_its_own() -> None:
    world = World()
    ready(world, "i", 7)
    exceeded = report("i", "failed").model_copy(update={"error": MemoryExceeded().body()})
    assert crashes_of(world.hear(e.EngineReported(exceeded))) == [isolation.MAX_CRASHES]
    assert crashes_of(world.hear(e.EngineReported(exceeded))) == [], "it is counted once"


def test_crash_while_there_was_no_agent_is_counted_at_adoption() -> None:
    world = World()
    ready(world, "i", 7)
    instance, state = world["i"], replace(world.state, instances={}, crashes={"demo@r": 1})
    world.state = state
    assert crashes_of(world.hear(e.Adopted(instance, False, ERROR, culprit="i"))) == [2]
    world.state = state
    assert crashes_of(world.hear(e.Adopted(instance, False, ERROR, culprit="other"))) == []


def test_counts_of_the_models_that_crashed_last_are_kept() -> None:
    world = World()
    ready(world, "i", 7)
    world.state = replace(world.state, crashes={f"m{n}@r": 1 for n in range(2000)})
    world.hear(e.EngineExited("i", 7, -11, ERROR, "i"))
    assert len(world.state.crashes) == 1024
    assert world.state.crashes["demo@r"] == 1
