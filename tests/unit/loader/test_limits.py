"""Memory limits of control groups.

Without them a loader in a container would use the host's total and be killed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from services.loader.app import pool_bytes
from shared.errors import InsufficientMemory
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from weights.load import load_private
from weights.pool import shm
from weights.pool.cgroup_limits import memory_limit, memory_room
from weights.pool.chunks import CHUNK_BYTES

MB = 1_000_000
NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


class Groups:
    """Control groups as the kernel shows them; `own` is /proc/self/cgroup."""

    def __init__(self, root: Path, version: int) -> None:
        self.sys, self.own, self._version = root / "cgroup", root / "own", version
        self.root = self.sys / "memory" if version == 1 else self.sys
        self.root.mkdir(parents=True)

    def enter(self, path: str) -> None:
        self.own.write_text(f"3:cpu,memory:{path}\n0::/\n" if self._version == 1 else f"0::{path}\n")

    def make(self, path: str, limit: str, used: int = 0, files: int = 0) -> None:
        group = self.root / path
        group.mkdir(parents=True, exist_ok=True)
        most, now, prefix = NAMES[self._version]
        (group / most).write_text(f"{limit}\n")
        (group / now).write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"shmem 5\n{prefix}inactive_file {files - 1}\n{prefix}active_file 1\n")

    def told(self) -> tuple[int | None, int | None]:
        return memory_limit(self.sys, self.own), memory_room(self.sys, self.own)


@pytest.fixture(params=[1, 2])
def groups(request: pytest.FixtureRequest, tmp_path: Path) -> Groups:
    return Groups(tmp_path, request.param)


def test_pages_of_files_give_way(groups: Groups) -> None:
    groups.enter("/a")
    groups.make("a", str(1000 * MB), used=700 * MB, files=200 * MB)
    assert groups.told() == (1000 * MB, 500 * MB)


def test_the_narrowest_of_the_groups_around_counts(groups: Groups) -> None:
    groups.enter("/a/b/c")
    groups.make("a", str(1000 * MB), used=900 * MB, files=1)
    groups.make("a/b", str(500 * MB), used=100 * MB, files=1)
    groups.make("a/b/c", "max" if groups.root == groups.sys else str(2**63 - 4096))
    assert groups.told() == (500 * MB, 100 * MB + 1)


def test_a_container_sees_its_own_group_as_the_root(groups: Groups) -> None:
    groups.enter("/docker/0123")
    groups.make("", str(1000 * MB), used=1200 * MB, files=1)
    assert groups.told() == (1000 * MB, 0)


def test_without_a_limit(groups: Groups) -> None:
    assert groups.told() == (None, None)
    groups.enter("/a")
    assert groups.told() == (None, None)


@pytest.fixture
def small(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """Place this process in a group of 64 MB."""
    groups.enter("/a")
    groups.make("a", str(64 * MB), used=40 * MB, files=1)
    monkeypatch.setattr(shm, "memory_limit", lambda: memory_limit(groups.sys, groups.own))
    monkeypatch.setattr(shm, "memory_room", lambda: memory_room(groups.sys, groups.own))
    return groups


def test_a_load_beyond_the_limit_is_refused_before_it_begins(small: Groups, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", tensors(megabytes=100))
    with pytest.raises(InsufficientMemory, match=r"control group .* may have 0\.06 GiB: raise its memory limit") as never:
        load_private(tmp_path / "m")
    assert never.value.should_retry is False


def test_a_load_beyond_what_is_left_may_fit_later(small: Groups, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", tensors(megabytes=40))
    with pytest.raises(InsufficientMemory, match=r"this control group 0\.02 GiB: put other models to sleep") as now:
        load_private(tmp_path / "m")
    assert now.value.should_retry is True
    small.make("a", str(64 * MB), used=10 * MB, files=1)
    load_private(tmp_path / "m").memory.close()


def test_the_pool_and_the_cache_are_made_for_it(small: Groups) -> None:
    assert pool_bytes() == 4 * CHUNK_BYTES
    assert shm.default_dram_bytes() < 4 * MB
    assert shm.short_of_memory() < 0
    small.make("a", str(64 * MB), used=63_900_000, files=1)
    assert shm.short_of_memory() > 0
