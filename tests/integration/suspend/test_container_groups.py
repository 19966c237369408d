"""Containers in cgroup v2: their processes stay in the group of their container engine.

It has the container's limits and accounts. A pid namespace in a group stands for a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.nodeagent.domain.state import Instance
from services.nodeagent.suspend import shared_memory
from services.nodeagent.suspend.cgroups import Cgroups, hierarchies, open_cgroups
from services.nodeagent.suspend.cpu import PageOut
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import Target
from services.nodeagent.suspend.suspender import Suspender
from shared.contracts.models import ContainerOptions
from shared.errors import CannotSuspend
from shared.processes import descendants
from tests.integration.suspend.process_tree import BALLAST
from tests.support.groups import remove_groups
from tests.unit.nodeagent.world import start

_UNUSED: Any = None
_GONE_WITHIN_S = 10.0


class Container:
    """A process tree in a group and a pid namespace of its own."""

    def __init__(self, group: Path) -> None:
        self.group = group
        group.mkdir()
        enter = f'echo 0 > {group}/cgroup.procs; exec "$@"'
        command = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", enter, "sh", sys.executable, str(BALLAST), "1", "1"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.line() == "ready"
        self.pids = tuple(descendants(self.process.pid)[1:])

    def line(self, word: str = "") -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if word:
            print(word, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def is_inside(self) -> bool:
        inside = set(map(int, (self.group / "cgroup.procs").read_text().split()))
        return inside.issuperset(self.pids)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            (self.group / "cgroup.freeze").write_text("0")
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        deadline = time.monotonic() + _GONE_WITHIN_S
        while self.group.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self.group.rmdir()
            time.sleep(0.01)


@pytest.fixture
def groups() -> Iterator[Cgroups]:
    found = open_cgroups(f"t{uuid.uuid4().hex[:6]}", version=2)
    if not found.available or os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip(f"needs root, unshare and a freezer of cgroup v2: {found.reason}")
    yield found
    remove_groups(f"{found.scope}.")


@pytest.fixture
def container(groups: Cgroups) -> Iterator[Container]:
    root = next(root for freezer, root in hierarchies() if freezer.version == 2)
    found = Container(root / f"container-{uuid.uuid4().hex[:8]}")
    yield found
    found.close()


def gather(groups: Cgroups, container: Container) -> tuple[int, ...]:
    return groups.gather("i", container.process.pid, include_host=False, others=container.pids, in_container=True)


def suspender(groups: Cgroups) -> Suspender:
    return Suspender({}, groups, MemoryUsage({}), _UNUSED, 1.0)


def instance(pids: tuple[int, ...]) -> Instance:
    command = start()
    spec = command.card.spec.model_copy(update={"engine": "vllm", "container": ContainerOptions(image="vllm:1")})
    card = command.card.model_copy(update={"spec": spec})
    return Instance(command=command.model_copy(update={"card": card}), token=1, progress_at=0.0, engine_pids=pids)


def test_container_is_frozen_in_the_group_of_its_container_engine(groups: Cgroups, container: Container) -> None:
    groups.create("i")
    before = container.line("digest")
    assert gather(groups, container) == tuple(sorted(container.pids))
    assert container.is_inside()
    assert groups.list_outside("i", container.pids) == ()
    groups.freeze("i")
    assert "frozen 1" in (container.group / "cgroup.events").read_text()
    assert container.is_inside()
    groups.thaw("i")
    assert container.line("digest") == before
    groups.kill("i")
    container.process.wait()
    assert groups.remove("i")
    assert container.group.is_dir(), "its container engine removes it"


def test_next_agent_finds_that_a_container_is_frozen(groups: Cgroups, container: Container) -> None:
    before = container.line("digest")
    gather(groups, container)
    groups.freeze("i")
    successor = open_cgroups(groups.scope, version=2)
    assert suspender(successor).is_frozen(instance(container.pids))
    successor.thaw("i")
    assert container.line("digest") == before
    assert not suspender(successor).is_frozen(instance(container.pids))


def test_group_with_other_processes_than_the_container_is_not_frozen(groups: Cgroups, container: Container) -> None:
    """A container engine without control groups leaves containers in its own group."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        (container.group / "cgroup.procs").write_text(str(other.pid))
        pids = gather(groups, container)
        assert container.is_inside()
        assert groups.list_outside("i", pids) == pids
        with pytest.raises(CannotSuspend, match="control group of its container"):
            asyncio.run(PageOut(groups).suspend(Target("i", "vllm", ("cpu:0",), pids, in_container=True)))
        assert "frozen 0" in (container.group / "cgroup.events").read_text()
        other.kill()


MAPPING = """
import sys
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=4096)
print("ready", flush=True)
sys.stdin.read()
segment.close()
segment.unlink()
"""


@pytest.mark.parametrize("is_container", [False, True], ids=["this machine", "container"])
def test_shared_memory_of_a_container_is_not_taken_for_that_of_this_machine(is_container: bool) -> None:
    """Files of both have the same names and the same inode numbers."""
    prefix = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"] if is_container else []
    if is_container and (os.geteuid() != 0 or shutil.which("unshare") is None):
        pytest.skip("needs root and unshare for a mount namespace")
    with subprocess.Popen([*prefix, sys.executable, "-c", MAPPING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert bool(shared_memory.find_mapped_inodes(process.pid)) is not is_container
