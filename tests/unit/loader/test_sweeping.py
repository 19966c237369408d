"""Pools of dead loaders are removed; pools in use are not."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from weights.pool import shm
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.memory import PoolMemory
from weights.pool.sweeping import sweep


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a substitute for /dev/shm, without other processes' files."""
    found = Path(f"/dev/shm/thaw-sweeping-{uuid.uuid4().hex[:8]}")
    found.mkdir()
    monkeypatch.setattr(shm, "SHM", found)
    yield found
    for path in found.iterdir():
        path.unlink()
    found.rmdir()


def left(place: Path, name: str = "thaw-0123abcd-pool") -> Path:
    path = place / name
    path.write_bytes(bytes(mmap.PAGESIZE))
    os.utime(path, (0, 0))
    return path


def test_an_unused_pool_is_removed(place: Path) -> None:
    left(place)
    other = left(place, "somebody-elses-pool")
    assert sweep() == ["thaw-0123abcd-pool"]
    assert list(place.iterdir()) == [other]


@pytest.mark.parametrize("name", ["thaw-0123abcd-pages-cpu1-12345678", "thaw-0123abcd-left-cpu1-12345678"])
def test_pages_of_separate_devices_are_removed_as_well(place: Path, name: str) -> None:
    left(place, name)
    assert sweep() == [name]


def test_recently_changed_pool_is_kept(place: Path) -> None:
    os.utime(left(place))
    assert sweep() == []


def test_pool_mapped_by_an_engine_is_kept(place: Path) -> None:
    path = left(place)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        file.close()
        assert sweep() == []
    assert sweep() == [path.name], "now no process has"


def test_own_pool_of_a_loader_is_kept(place: Path) -> None:
    pool = PoolMemory("thaw-0123abcd-pool", CHUNK_BYTES, keep=True)
    os.utime(pool.path, (0, 0))
    try:
        assert sweep() == []
    finally:
        pool.close(unlink=True)
