"""Control groups of both versions and page-out, on real processes.

All of the tree is found, frozen, paged out and restored, byte for byte.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

from services.nodeagent.suspend import memory
from services.nodeagent.suspend.cgroups import Cgroups
from services.nodeagent.suspend.cpu import PageOut
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import Target
from services.nodeagent.suspend.suspender import Suspender
from shared.errors import CannotSuspend, EngineFailed, PermissionDenied
from shared.processes import descendants
from tests.integration.suspend.process_tree import MIB, Tree
from tests.support.process_memory import bounds_of_pss


@pytest.fixture
def tree(groups: Cgroups) -> Iterator[Tree]:
    found = Tree(60, 2)
    yield found
    groups.kill("i")
    found.close()


@pytest.fixture
def way(able: None, groups: Cgroups) -> PageOut:
    return PageOut(groups)


async def test_process_tree_is_paged_out_and_restored_byte_for_byte(way: PageOut, groups: Cgroups, tree: Tree) -> None:
    before = tree.digest()
    target = tree.target(groups)
    assert len(target.pids) == 3
    taken = await way.suspend(target)
    assert groups.is_frozen("i")
    assert taken.freed_bytes >= 0.75 * taken.used_bytes
    least, most = bounds_of_pss(target.pids)
    assert least <= taken.left_bytes <= most
    assert taken.snapshot_bytes >= 150 * MIB
    await way.resume(target)
    assert not groups.is_frozen("i")
    assert tree.digest() == before


async def test_pages_used_after_a_resume_are_prefetched_the_next_time(
    way: PageOut, groups: Cgroups, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = note_advice(monkeypatch)
    target = tree.target(groups)
    for turn in range(3):
        before = tree.digest()
        given.clear()
        await way.suspend(target)
        await way.resume(target)
        await way.wait_for_prefetches()
        assert tree.digest() == before
        # The digest reads all memory; the node learns that in the first turn.
        assert (memory.MADV_WILLNEED in given) == (turn > 0)


async def test_pages_used_are_known_after_the_processes_changed_their_instance(
    way: PageOut, groups: Cgroups, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template's engine gets another id: what was resident was not all created just now."""
    given = note_advice(monkeypatch)
    target = tree.target(groups)
    await way.suspend(target)
    await way.resume(target)
    tree.digest()
    for pid in target.pids:
        groups.add("j", pid)
    way.rename("i", "j")
    renamed = replace(target, instance_id="j")
    try:
        await way.suspend(renamed)
        given.clear()
        await way.resume(renamed)
        await way.wait_for_prefetches()
    finally:
        groups.kill("j")
    assert memory.MADV_WILLNEED in given


async def test_pages_of_processes_that_were_started_again_are_not_prefetched(
    way: PageOut, groups: Cgroups, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host starts an engine again that failed to change its model: all is resident then."""
    given = note_advice(monkeypatch)
    target = tree.target(groups)
    await way.suspend(target)
    await way.resume(target)
    groups.kill("i")
    tree.process.wait(60)
    later = Tree(10, 1)
    try:
        again = later.target(groups)
        before = later.digest()
        await way.suspend(again)
        given.clear()
        await way.resume(again)
        await way.wait_for_prefetches()
        assert later.digest() == before
    finally:
        later.close()
    assert memory.MADV_WILLNEED not in given


def note_advice(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list that will hold all advice that the kernel is given."""
    given: list[int] = []
    real = memory.advise

    def noted(pid: int, ranges: Iterable[tuple[int, int]], advice: int) -> int:
        given.append(advice)
        return real(pid, ranges, advice)

    monkeypatch.setattr(memory, "advise", noted)
    return given


def test_resident_pages_are_found_individually(able: None) -> None:
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 4096 * page) as area:
        base = ctypes.addressof(ctypes.c_char.from_buffer(area))
        area.madvise(mmap.MADV_NOHUGEPAGE)
        for number in (0, 1, 5, 1000, 4095):  # the second gap exceeds a fault's read size
            area[number * page] = 1
        found = [r for r in memory.find_resident(os.getpid()) if base <= r[0] < base + 4096 * page]
    assert found == [(base, 6 * page), (base + 1000 * page, page), (base + 4095 * page, page)]


async def test_processes_forked_after_the_last_scan_are_frozen(way: PageOut, groups: Cgroups, tree: Tree) -> None:
    target = tree.target(groups)
    late = Target("i", "vllm", ("cpu:0",), target.pids[:1])
    await way.suspend(late)
    states = {Path(f"/proc/{p}/wchan").exists() and groups.is_frozen("i") for p in target.pids}
    assert states == {True}
    await way.resume(late)


def test_frozen_processes_can_be_killed(groups: Cgroups, tree: Tree) -> None:
    tree.target(groups)
    groups.freeze("i")
    groups.kill("i")
    assert tree.process.wait(60) == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while groups.pids("i") and time.monotonic() < deadline:
        os.sched_yield()
    assert groups.pids("i") == ()
    assert groups.remove("i")


SHARING = """
import multiprocessing, sys
from multiprocessing.shared_memory import SharedMemory
own, foreign = SharedMemory(create=True, size=4096), SharedMemory(name=sys.argv[1])
lock = multiprocessing.get_context("spawn").Lock()
print(own.name, "sem." + lock._semlock.name.lstrip("/"), flush=True)
sys.stdin.read()
"""


def test_shared_memory_of_a_killed_engine_is_removed_and_that_of_others_kept(groups: Cgroups) -> None:
    """A killed engine's shared memory is removed; memory that others use stays.

    All its processes are killed at once, so none can clean up.
    """
    others = SharedMemory(create=True, size=4096)
    process = subprocess.Popen(
        [sys.executable, "-c", SHARING, others.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        own = [Path("/dev/shm") / name for name in process.stdout.readline().decode().split()]
        assert len(own) == 2
        assert all(p.is_file() for p in own), "a segment and a semaphore"
        groups.gather("i", process.pid, include_host=True)
        groups.freeze("i")
        groups.kill("i")
        process.wait(60)
        unused: Any = None
        asyncio.run(Suspender({}, groups, MemoryUsage({}), unused, 1.0).on_ended("i"))
        assert not any(p.exists() for p in own)
        assert (Path("/dev/shm") / others.name).exists()
    finally:
        process.kill()
        process.communicate()
        others.close()
        others.unlink()


def test_descendants_are_found_to_the_last(tree: Tree) -> None:
    assert len(descendants(tree.process.pid)) == 3


def test_operations_on_a_missing_group_are_no_ops(groups: Cgroups) -> None:
    groups.thaw("nobody")
    groups.kill("nobody")
    assert groups.pids("nobody") == ()
    assert not groups.is_frozen("nobody")
    assert groups.remove("nobody")
    groups.add("gone", 7_000_001)  # ended meanwhile


def test_missing_control_groups_are_reported_with_the_reason() -> None:
    none = Cgroups("n", None, None, "not here")
    assert none.create("i") is None
    with pytest.raises(EngineFailed, match="not here"):
        none.freeze("i")
    assert list(none.known()) == []


async def test_engine_whose_memory_is_not_freed_keeps_running(
    way: PageOut, groups: Cgroups, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "advise", lambda *_: 0)
    with pytest.raises(CannotSuspend, match="were freed"):
        await way.suspend(tree.target(groups))
    assert not groups.is_frozen("i"), "it runs as before"
    tree.digest()


async def test_suspension_without_the_capability_is_refused(
    way: PageOut, groups: Cgroups, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionDenied("process_madvise needs CAP_SYS_NICE")

    monkeypatch.setattr(memory, "advise", refuse)
    with pytest.raises(CannotSuspend, match="CAP_SYS_NICE"):
        await way.suspend(tree.target(groups))
    assert not groups.is_frozen("i")


def test_suspension_without_free_swap_is_refused(
    way: PageOut, groups: Cgroups, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tree.target(groups)
    assert way.outlook(target).way == "cpu"
    monkeypatch.setattr(memory, "swap_space", lambda: memory.Swap(1 << 30, 10 * MIB))
    assert "of free swap" in way.outlook(target).reason
    monkeypatch.setattr(memory, "swap_space", lambda: memory.Swap(0, 0))
    assert "no swap" in way.outlook(target).reason
    monkeypatch.setattr(memory, "has_capability", lambda _: False)
    assert "CAP_SYS_NICE" in way.explain_unavailable()


async def test_processes_that_cannot_be_grouped_are_not_suspended(way: PageOut, groups: Cgroups, tree: Tree) -> None:
    pids = tuple(descendants(tree.process.pid))
    outside = Target("i", "vllm", ("cpu:0",), pids)
    groups.create("i")
    assert "cannot be moved into a control group" in way.outlook(outside).reason
    with pytest.raises(CannotSuspend, match="cannot be moved"):
        await way.suspend(outside)
