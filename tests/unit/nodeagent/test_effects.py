"""Effects on engines that have ended, hang, or have lost NATS."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.nodeagent.adapters.timelines import Timelines
from services.nodeagent.domain import events as e
from services.nodeagent.domain.events import Event
from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.state import Instance, NodeState, Process, SuspendState
from services.nodeagent.effects import EffectPorts, EffectRunner
from services.nodeagent.suspend.cgroups import Cgroups
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.suspender import Suspender
from shared.contracts.base import Done, Message
from shared.contracts.engine import EngineAsleep, EngineProbed, SleepEngine
from shared.contracts.executor import InstanceDetached
from shared.contracts.node import InstanceState
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
        self.is_lost = True

    async def detach(self, *_: Any) -> InstanceDetached:
        return self._detach()

    def note_silent(self, pid: int, _: float) -> bool:
        self.silent.append(pid)
        return self.is_lost

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
        suspender: Suspender | None = None,
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
            "suspender": suspender or FakeSuspender(unpause),
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


def make_paused(**more: Any) -> Instance:
    """Return a ready instance whose engine may be paused, and has to serve again."""
    return instance("i", state=InstanceState.READY, suspend_state=SuspendState(pause_asked=True), **more)


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


@pytest.mark.parametrize("is_lost", [True, False])
async def test_executor_that_does_not_answer_is_ended_unless_its_connection_may_be_half_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    def hang() -> InstanceDetached:
        raise DeadlineExceeded("no answer")

    sent: list[tuple[str, str]] = []
    async with asyncio.TaskGroup() as tasks:
        node = Node(tmp_path, tasks, instance("i", is_shared=True), mesh=FakeMesh(), detach=hang)
        node.executors.is_lost = is_lost
        monkeypatch.setattr(node.runner.processes, "send", lambda *order: sent.append(order))
        node.runner.perform(e.Signal("i", "kill"))
    assert node.executors.silent == [PID]
    assert sent == ([("i", "kill")] if is_lost else [])


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


@pytest.mark.parametrize("state", [InstanceState.READY, InstanceState.RESUMING])
async def test_engine_that_does_not_serve_again_while_nats_is_away_is_asked_again(tmp_path: Path, state: InstanceState) -> None:
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

    known = make_paused().model_copy(update={"state": state})
    async with asyncio.TaskGroup() as tasks:
        node = Node(tmp_path, tasks, known, mesh=mesh, detach=detached, unpause=unpause)
        node.runner.perform(e.Resume("i", None))
        assert await node.next_event() == e.Resumed("i", 60)


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_engine_that_does_not_serve_again_is_asked_once_by_each_effect(tmp_path: Path, is_stopped: bool) -> None:
    mesh, fault = FakeMesh(), RestoreFailed("no answer")
    mesh.is_connected = not is_stopped

    def unpause() -> int:
        raise fault

    async with asyncio.TaskGroup() as tasks:
        node = Node(tmp_path, tasks, make_paused(stop_asked=is_stopped), mesh=mesh, detach=detached, unpause=unpause)
        node.runner.perform(e.Resume("i", None))
        assert await node.next_event() == e.ResumeFailed("i", fault.body())


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_engine_suspended_between_two_attempts_to_unpause_is_not_woken(tmp_path: Path, is_waiting: bool) -> None:
    """Its memory may belong to another model."""
    mesh, fault = FakeMesh(), RestoreFailed("no answer")
    asked = 0

    def suspend() -> None:
        frozen = make_paused().model_copy(
            update={"state": InstanceState.SUSPENDED, "suspend_state": SuspendState(freezing=True, frees_bytes=50)}
        )
        node.loop.state = NodeState(node.loop.state.ledger, instances={"i": frozen})

    def unpause() -> int:
        nonlocal asked
        asked += 1
        mesh.reconnections += 1
        if is_waiting:
            asyncio.get_running_loop().call_soon(suspend)
        else:
            suspend()
        raise fault

    async with asyncio.TaskGroup() as tasks:
        node = Node(tmp_path, tasks, make_paused(), mesh=mesh, detach=detached, unpause=unpause)
        node.runner.perform(e.Resume("i", None))
        assert await node.next_event() == e.ResumeFailed("i", fault.body())
    assert asked == 1


class Engine:
    """An engine's answers to its nodeagent, and what the nodeagent does with it, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.is_connected = False
        """It connects to NATS at the latest for a pause."""
        self.missed = asyncio.Event()
        """Set when it has missed a `WakeEngine`."""

    async def ask(self, _: str, request: Any, __: Any) -> Message:
        self.done.append(type(request).__name__)
        if isinstance(request, SleepEngine):
            self.is_connected = True
            return EngineAsleep(level=0, took_ms=1.0)
        if not self.is_connected:
            self.missed.set()
            raise Unreachable("it reconnects")
        return EngineProbed(same=True, took_ms=1.0)


class SlowGroups(Cgroups):
    """Control groups whose processes are listed as soon as `may_list` is set."""

    def __init__(self, done: list[str]) -> None:
        super().__init__("n", None, None)
        self._done = done
        self.lists, self.may_list = threading.Event(), threading.Event()

    def gather(self, *_: Any, **__: Any) -> tuple[int, ...]:
        self.lists.set()
        assert self.may_list.wait(60)
        return ()

    def thaw(self, instance_id: str) -> None:
        self._done.append("thaw")


@contextlib.asynccontextmanager
async def unpausing(engine: Engine, tmp_path: Path) -> AsyncIterator[tuple[Node, SlowGroups]]:
    """Yield a node that unpauses an engine, and waits until its processes are listed."""
    groups = SlowGroups(engine.done)
    suspender = Suspender({}, groups, MemoryUsage({}), cast(Any, engine.ask), 60.0)
    async with asyncio.TaskGroup() as tasks:
        node = Node(tmp_path, tasks, make_paused(), mesh=FakeMesh(), detach=detached, suspender=suspender)
        node.runner.perform(e.Resume("i", None))
        assert await asyncio.to_thread(groups.lists.wait, 60)
        yield node, groups


@pytest.mark.parametrize("is_sent", [False, True], ids=["not thawed yet", "unreachable"])
async def test_engine_is_not_thawed_or_woken_after_it_was_asked_to_pause_again(tmp_path: Path, is_sent: bool) -> None:
    """It would run after its suspension, with memory that belongs to another model."""
    engine = Engine()
    async with unpausing(engine, tmp_path) as (node, groups):
        if is_sent:
            groups.may_list.set()
            await asyncio.wait_for(engine.missed.wait(), 60)
        node.runner.perform(e.PauseEngine("i", only_if_idle=True))
        assert await node.next_event() == e.PauseAnswered("i", True)
        groups.may_list.set()
    assert engine.done.index("SleepEngine") == len(engine.done) - 1
    assert ("thaw" in engine.done) is is_sent
    assert node.events.empty(), "the answer to the pause decides"


async def test_only_the_newest_attempt_to_unpause_is_reported(tmp_path: Path) -> None:
    """The failure of an older one would count against the newest."""
    engine = Engine()
    engine.is_connected = True
    async with unpausing(engine, tmp_path) as (node, groups):
        node.runner.perform(e.Resume("i", None))
        groups.may_list.set()
        assert await node.next_event() == e.Resumed("i", 0)
    assert node.events.empty()
