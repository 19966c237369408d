"""Effects on engines that have ended, hang, or have lost NATS."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.nodeagent.adapters.timelines import Timelines
from services.nodeagent.domain import events as e
from services.nodeagent.domain.events import Event
from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.state import Instance, NodeState, Process
from services.nodeagent.effects import EffectPorts, EffectRunner
from shared.contracts.base import Done
from shared.contracts.executor import InstanceDetached
from shared.errors import DeadlineExceeded, EngineFailed, RestoreFailed, ThawError, Unreachable
from tests.unit.nodeagent.world import start

PID = 1 << 22
"""No process has it."""


class FakeMesh:
    """NATS, with an answer or an error for each request."""

    def __init__(self, *answers: Done | ThawError) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.is_connected = True
        self.reconnections = 0

    async def request(self, *_: Any) -> Done:
        self.asked += 1
        answer = self.answers.pop(0)
        if isinstance(answer, ThawError):
            raise answer
        return answer


class FakeExecutors:
    """An executor that detaches as `detach` says."""

    def __init__(self, detach: Callable[[], InstanceDetached]) -> None:
        self._detach = detach
        self.silent: list[int] = []

    async def detach(self, *_: Any) -> InstanceDetached:
        return self._detach()

    def note_silent(self, pid: int, _: float) -> None:
        self.silent.append(pid)

    def culprit(self, _: int) -> str:
        return ""

    def is_stuck(self, _: int) -> bool:
        return False

    def is_silent(self, _: int) -> bool:
        return False


class FakeSuspender:
    """An engine whose template cannot be woken, and whose processes hang in a driver.

    It serves again as `unpause` says.
    """

    def __init__(self, unpause: Callable[[], int]) -> None:
        self._unpause = unpause

    async def resume(self, *_: Any) -> int:
        return self._unpause()

    async def hand_over(self, *_: Any) -> None:
        raise RestoreFailed("its process has ended")

    async def on_ended(self, *_: Any, **__: Any) -> None:
        raise EngineFailed("a process cannot be ended")


def detached() -> InstanceDetached:
    return InstanceDetached()


class Node:
    """Effects of a node with fake ports, and the events that they post."""

    def __init__(
        self,
        tmp_path: Path,
        tasks: asyncio.TaskGroup,
        *instances: Instance,
        mesh: FakeMesh,
        detach: Callable[[], InstanceDetached],
        unpause: Callable[[], int] = int,
    ) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.executors = FakeExecutors(detach)
        state = NodeState(Ledger({"cpu:0": 100}), instances={i.instance_id: i for i in instances})
        self.loop = SimpleNamespace(state=state, post=self.events.put_nowait)
        ports = {
            "mesh": mesh,
            "launcher": SimpleNamespace(exit_status=_killed, name_for=lambda _: "direct"),
            "records": SimpleNamespace(charges_path=lambda name: tmp_path / f"{name}.charges"),
            "timelines": Timelines("nodeagent"),
            "meter": SimpleNamespace(oom_window=lambda: (None, None)),
            "suspender": FakeSuspender(unpause),
            "executors": self.executors,
        }
        parts = EffectPorts(publisher=cast(Any, None), **cast(Any, ports))
        self.runner = EffectRunner(parts, "n", tmp_path, {}, cast(Any, self.loop), tasks)

    async def next_event(self) -> Event:
        return await asyncio.wait_for(self.events.get(), 60)


async def _killed(*_: Any) -> int:
    return -9


def instance(name: str, **more: Any) -> Instance:
    return Instance(command=start(name), token=1, progress_at=0.0, **{"pid": PID, "process": Process.ALIVE, **more})


async def test_exit_of_a_template_just_before_it_is_taken_is_that_of_the_new_instance(tmp_path: Path) -> None:
    """Nothing else would report it: the instance would keep its memory for ever."""
    template, taker = instance("a", process=Process.GONE), instance("b", taken_from="a")
    async with asyncio.TaskGroup() as tasks:
        node = Node(tmp_path, tasks, template, taker, mesh=FakeMesh(), detach=detached)
        node.runner.perform(e.Take("b", "a"))
        found = await node.next_event()
    assert isinstance(found, e.EngineExited)
    assert (found.instance_id, found.pid, found.returncode) == ("b", PID, -9)


async def test_exit_is_reported_though_other_processes_of_the_engine_hang(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        node = Node(tmp_path, tasks, instance("i"), mesh=FakeMesh(), detach=detached)
        node.runner._on_exited("i", PID)
        assert isinstance(await node.next_event(), e.EngineExited)


async def test_executor_is_not_ended_because_nats_was_away(tmp_path: Path) -> None:
    """It serves other models, whose responses continue once NATS is back."""

    def lose_nats() -> InstanceDetached:
        mesh.is_connected = False
        raise DeadlineExceeded("no answer")

    def restart_nats() -> InstanceDetached:
        mesh.reconnections += 1
        raise Unreachable("it reconnects")

    shared = instance("i", is_shared=True)
    for fault in (lose_nats, restart_nats):
        mesh = FakeMesh()
        async with asyncio.TaskGroup() as tasks:
            node = Node(tmp_path, tasks, shared, mesh=mesh, detach=fault)
            node.runner.perform(e.Signal("i", "kill"))
        assert node.executors.silent == []
        assert node.events.empty(), "the decision is repeated"


async def test_executor_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    def hang() -> InstanceDetached:
        raise DeadlineExceeded("no answer")

    async with asyncio.TaskGroup() as tasks:
        node = Node(tmp_path, tasks, instance("i", is_shared=True), mesh=FakeMesh(), detach=hang)
        node.runner.perform(e.Signal("i", "kill"))
    assert node.executors.silent == [PID]


async def test_detached_instance_has_exited_and_its_executor_has_not(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        node = Node(tmp_path, tasks, instance("i", is_shared=True), mesh=FakeMesh(), detach=detached)
        node.runner.perform(e.Signal("i", "term"))
        found = await node.next_event()
    assert isinstance(found, e.EngineExited)
    assert found.is_detached


async def test_engine_that_reconnects_to_nats_is_asked_to_drain_again(tmp_path: Path) -> None:
    """Its requests would be ended otherwise, long before the deadline of the drain."""
    mesh = FakeMesh(Unreachable("it reconnects"), Done())
    async with asyncio.TaskGroup() as tasks:
        node = Node(tmp_path, tasks, instance("i", stop_asked=True), mesh=mesh, detach=detached)
        node.runner.perform(e.RequestDrain("i", only_if_idle=False, reason="test"))
        assert await node.next_event() == e.DrainAnswered("i", only_if_idle=False)
    assert mesh.asked == 2


async def test_engine_that_has_no_time_to_drain_is_asked_once(tmp_path: Path) -> None:
    away = Unreachable("nothing subscribes")
    for known in (instance("i", stop_asked=True, kill_at=1.0), instance("i", stop_asked=True, process=Process.GONE), instance("i")):
        mesh = FakeMesh(away)
        async with asyncio.TaskGroup() as tasks:
            node = Node(tmp_path, tasks, known, mesh=mesh, detach=detached)
            node.runner.perform(e.RequestDrain("i", only_if_idle=False, reason="test"))
            assert await node.next_event() == e.DrainAnswered("i", only_if_idle=False, error=away.body())


async def test_engine_that_does_not_serve_again_while_nats_is_away_is_asked_again(tmp_path: Path) -> None:
    """It would be started cold, and its responses ended, once NATS is back."""
    mesh, asked = FakeMesh(), itertools.count(1)

    def unpause() -> int:
        match next(asked):
            case 1:
                mesh.is_connected = False
            case 2:
                mesh.is_connected = True
                mesh.reconnections += 1
            case _:
                return 60
        raise RestoreFailed("no answer")

    async with asyncio.TaskGroup() as tasks:
        node = Node(tmp_path, tasks, instance("i"), mesh=mesh, detach=detached, unpause=unpause)
        node.runner.perform(e.Resume("i", None))
        assert await node.next_event() == e.Resumed("i", 60)


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_engine_that_does_not_serve_again_is_asked_once_by_each_effect(tmp_path: Path, is_stopped: bool) -> None:
    mesh, fault = FakeMesh(), RestoreFailed("no answer")
    mesh.is_connected = not is_stopped

    def unpause() -> int:
        raise fault

    async with asyncio.TaskGroup() as tasks:
        node = Node(tmp_path, tasks, instance("i", stop_asked=is_stopped), mesh=mesh, detach=detached, unpause=unpause)
        node.runner.perform(e.Resume("i", None))
        assert await node.next_event() == e.ResumeFailed("i", fault.body())
