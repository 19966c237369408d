"""Statuses and phases of an instance that joins an executor."""

from __future__ import annotations

import pytest

from services.nodeagent.adapters.timelines import StartTimeline
from services.nodeagent.domain import events as e
from services.nodeagent.domain.events import Effect, Publish
from shared.contracts.engine import EngineReport
from shared.contracts.phases import Phase
from tests.unit.nodeagent.shared_instances import shared
from tests.unit.nodeagent.world import ERROR, World, report, start


def urgent(effects: tuple[Effect, ...]) -> list[bool]:
    return [p.urgent for p in effects if isinstance(p, Publish)]


def loading(*, accepts_requests: bool = False) -> EngineReport:
    return report(state="loading").model_copy(update={"accepts_requests": accepts_requests})


def attaching(world: World) -> list[bool]:
    """Bring an instance to its load, and return the urgency of its statuses."""
    steps = (e.StartCommand(shared(), 1), e.EngineForked("i", 7, 1), e.EngineReported(loading()))
    return [is_urgent for step in steps for is_urgent in urgent(world.receive(step))]


def test_steps_of_an_attach_may_wait() -> None:
    assert attaching(World()) == [False] * 3


@pytest.mark.parametrize("event", [e.EngineReported(loading(accepts_requests=True)), e.EngineReported(report())])
def test_change_that_requests_wait_for_is_published_at_once(event: e.EngineReported) -> None:
    world = World()
    attaching(world)
    assert Publish(is_awaited=True) in world.receive(event)


def test_failed_attach_is_published_soon() -> None:
    world = World()
    attaching(world)
    assert True in urgent(world.receive(e.EngineExited("i", 7, 1, ERROR)))


def test_steps_of_a_fork_are_published_soon() -> None:
    world = World()
    effects = (*world.receive(e.StartCommand(start(), 1)), *world.receive(e.EngineForked("i", 7, 1)))
    assert urgent(effects) == [True, True]


def test_memory_of_an_executor_is_measured_after_the_first_requests() -> None:
    world = World()
    attaching(world)
    (measure,) = [m for m in world.receive(e.EngineReported(report())) if isinstance(m, e.Measure)]
    assert measure.after_s > 0


def test_attach_ends_with_the_executors_answer() -> None:
    timeline = StartTimeline("agent")
    timeline.record_command((), 0.0)
    timeline.attaching()
    timeline.end_attach()
    before = [s for s in timeline.spans(0.0) if s.phase is Phase.ATTACH]
    timeline.record_report(loading(), None)
    assert [s for s in timeline.spans(0.0) if s.phase is Phase.ATTACH] == before != []
