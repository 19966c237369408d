"""Reports of the later stages of an instance."""

from __future__ import annotations

from services.nodeagent.domain.events import EngineForked, EngineReported, RequestDrain, Signal, StartCommand
from shared.contracts.engine import EngineReport
from shared.contracts.node import InstanceState
from shared.contracts.stages import stage_instance
from shared.errors import InsufficientMemory
from tests.unit.nodeagent.world import World, report, start


def test_later_stage_of_a_known_instance_is_not_drained() -> None:
    world = World("cpu:0", "cpu:1")
    world.receive(StartCommand(start("i", devices=("cpu:0", "cpu:1")), 1))
    effects = world.receive(EngineReported(report(stage_instance("i", 1), "loading", 8)))
    world.receive(EngineForked("i", 7, 1))
    effects += world.receive(EngineReported(report(stage_instance("i", 1), "ready", 8)))
    assert not [e for e in effects if isinstance(e, RequestDrain)]
    assert world["i"].state is InstanceState.PREPARING


def test_stage_without_an_instance_is_drained() -> None:
    effects = World().receive(EngineReported(report(stage_instance("gone", 1), "ready", 8)))
    assert [e.instance_id for e in effects if isinstance(e, RequestDrain)] == [stage_instance("gone", 1)]


def test_failure_of_a_later_stage_fails_the_instance_with_its_error() -> None:
    world = World("cpu:0", "cpu:1")
    world.ready("i", devices=("cpu:0", "cpu:1"))
    error = InsufficientMemory("The stage has no room").body()
    effects = world.receive(EngineReported(EngineReport(instance_id=stage_instance("i", 1), pid=8, state="failed", error=error)))
    assert world["i"].state is InstanceState.FAILED
    assert world["i"].error == error
    assert [e for e in effects if isinstance(e, Signal)]
    assert world.state.ledger.sum_reserved("cpu:1") == 30, "booked until the process has exited"
