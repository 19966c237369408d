"""The suspender's work beside the suspend methods."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.nodeagent.domain import events as e
from services.nodeagent.domain.state import Instance
from services.nodeagent.suspend import suspender as module
from services.nodeagent.suspend.cgroups import Cgroups, FreezerV2
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.suspender import Suspender
from shared.contracts.models import ContainerOptions
from shared.contracts.node import InstanceState, SuspendWay
from shared.errors import EngineFailed
from shared.processes import MARK_VARIABLE, mark_of
from tests.unit.nodeagent.world import ERROR, World

_UNUSED: Any = None


class Busy(Cgroups):
    """An empty group is busy until shortly after its last process has ended."""

    refusals = 2

    def remove(self, instance_id: str) -> bool:
        self.refusals -= 1
        return self.refusals < 0 and super().remove(instance_id)


async def test_control_group_of_an_exited_engine_is_removed(tmp_path: Path) -> None:
    groups = Busy("n", tmp_path, FreezerV2())
    assert groups.create("i") is not None
    await Suspender({}, groups, MemoryUsage({}), _UNUSED, 1.0).on_ended("i")
    assert list(groups.known()) == []


class Hanging(Cgroups):
    """A group whose process hangs in the kernel, where no signal ends it."""

    def pids(self, instance_id: str) -> tuple[int, ...]:
        return (4321,)

    def kill(self, instance_id: str, spared: int | None = None) -> None: ...


async def test_process_that_cannot_be_ended_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may use memory that the node would give away otherwise."""
    monkeypatch.setattr(module, "_ENDED_WITHIN_S", 0.0)
    with pytest.raises(EngineFailed, match="4321"):
        await Suspender({}, Hanging("n", tmp_path, FreezerV2()), MemoryUsage({}), _UNUSED, 1.0).on_ended("i")


async def test_marked_process_that_cannot_be_ended_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "end_marked", lambda mark: False)
    monkeypatch.setattr(module, "find_marked", lambda mark: {4321})
    with pytest.raises(EngineFailed, match="4321"):
        await Suspender({}, Cgroups("n", None, None), MemoryUsage({}), _UNUSED, 1.0).on_ended("i")


def test_only_for_hosted_engines_are_marked_processes_searched(tmp_path: Path) -> None:
    groups = Cgroups("n", tmp_path, FreezerV2())
    marked = {**os.environ, MARK_VARIABLE: mark_of(groups.scope, "i")}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=marked, stdin=subprocess.PIPE) as left:
        suspender = Suspender({}, groups, MemoryUsage({}), _UNUSED, 1.0)
        asyncio.run(suspender.on_ended("i", is_hosted=False))
        assert left.poll() is None, "only hosts mark processes"
        asyncio.run(suspender.on_ended("i"))
        assert left.wait(60) < 0


def suspended_by(way: SuspendWay) -> Instance:
    record = World().suspended("a", left=10)
    outlook = record.suspend_state.outlook.model_copy(update={"way": way})
    return record.model_copy(update={"suspend_state": record.suspend_state.model_copy(update={"outlook": outlook})})


@pytest.mark.parametrize(("way", "stays"), [("cuda", True), ("sleep_cuda", True), ("cpu", False)])
def test_next_agent_leaves_checkpointed_engines_suspended_without_control_groups(way: SuspendWay, stays: bool) -> None:
    """Their memory is that of others by now, and was booked a second time."""
    record = suspended_by(way)
    suspender = Suspender({}, Cgroups("n", None, None), MemoryUsage({}), _UNUSED, 1.0)
    new = World()
    new.receive(e.Adopted(record, True, ERROR, suspender.is_frozen(record)))
    assert (new["a"].state is InstanceState.SUSPENDED) is stays
    assert (new.state.ledger.sum_reserved("cpu:0") == 10) is stays


@pytest.mark.parametrize(("way", "stays"), [("cuda", True), ("cpu", False)])
def test_next_agent_leaves_checkpointed_containers_suspended_that_it_cannot_freeze(
    tmp_path: Path, way: SuspendWay, stays: bool
) -> None:
    """Their group belongs to another user. The instance's own group is empty, and may be gone."""
    record = suspended_by(way)
    command = record.command
    spec = command.card.spec.model_copy(update={"engine": "vllm", "container": ContainerOptions(image="vllm:1")})
    command = command.model_copy(update={"card": command.card.model_copy(update={"spec": spec})})
    record = record.model_copy(update={"command": command, "engine_pids": (os.getpid(),)})
    suspender = Suspender({}, Cgroups("n", tmp_path, FreezerV2()), MemoryUsage({}), _UNUSED, 1.0)
    assert suspender.is_frozen(record) is stays


class Removed(FreezerV2):
    """A group that its container engine removes while its file is open."""

    def set_frozen(self, directory: Path, frozen: bool) -> None:
        raise OSError(self.error, os.strerror(self.error))

    def __init__(self, error: int) -> None:
        self.error = error


def test_removed_group_is_thawed_without_an_error(tmp_path: Path) -> None:
    for error in (errno.ENOENT, errno.ENODEV):
        Cgroups("n", tmp_path, Removed(error)).thaw("i")
    with pytest.raises(PermissionError):
        Cgroups("n", tmp_path, Removed(errno.EACCES)).thaw("i")
