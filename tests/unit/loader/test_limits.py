"""Memory limits of control groups.

Without them a loader in a container would use the host's total and be killed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from services.loader.app import pool_bytes
from shared.control_groups import memory_limit, memory_room
from shared.errors import InsufficientMemory
from tests.support.memory_limits import MB, Groups
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from weights.load import load_private
from weights.pool import shm
from weights.pool.chunks import CHUNK_BYTES


@pytest.fixture(params=[1, 2])
def groups(request: pytest.FixtureRequest, tmp_path: Path) -> Groups:
    return Groups(tmp_path, request.param)


@pytest.fixture
def small(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """Place this process in a group of 64 MB."""
    groups.enter("/a")
    groups.make("a", str(64 * MB), used=40 * MB, files=1)
    monkeypatch.setattr(shm, "memory_limit", lambda: memory_limit(groups.sys, groups.own))
    monkeypatch.setattr(shm, "memory_room", lambda: memory_room(groups.sys, groups.own))
    return groups


def test_load_over_the_group_limit_is_refused_before_it_starts(small: Groups, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", tensors(megabytes=100))
    with pytest.raises(InsufficientMemory, match=r"control group .* may have 0\.06 GiB: raise its memory limit") as never:
        load_private(tmp_path / "m")
    assert never.value.should_retry is False


def test_load_over_the_free_memory_may_be_retried(small: Groups, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", tensors(megabytes=40))
    with pytest.raises(InsufficientMemory, match=r"this control group 0\.02 GiB: put other models to sleep") as now:
        load_private(tmp_path / "m")
    assert now.value.should_retry is True
    small.make("a", str(64 * MB), used=10 * MB, files=1)
    load_private(tmp_path / "m").memory.close()


def test_pool_and_cache_are_sized_by_the_group_limit(small: Groups) -> None:
    assert pool_bytes() == 4 * CHUNK_BYTES
    assert shm.default_dram_bytes() < 4 * MB
    assert shm.short_of_memory() < 0
    small.make("a", str(64 * MB), used=63_900_000, files=1)
    assert shm.short_of_memory() > 0
