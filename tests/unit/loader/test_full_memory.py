"""A shared-memory file system fills up during a load: an error, never a SIGBUS."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import InsufficientMemory
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from tests.unit.loader.page_cache import evict
from weights.formats.segment import Layout
from weights.load import load_segment
from weights.pool import shm

MB = 1024 * 1024


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Mount a file system of 64 MB in memory, which the loader uses as /dev/shm."""
    directory = tmp_path / "shm"
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", directory], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"may not mount here: {mounted.stderr.decode().strip()}")
    monkeypatch.setattr(shm, "SHM", directory)
    yield directory
    subprocess.run(["umount", directory], check=True)


@pytest.mark.root
@pytest.mark.parametrize("cached", [False, True])
def test_memory_taken_by_another_process_fails_the_load(tmp_path: Path, small: Path, cached: bool) -> None:
    model = tmp_path / "model"
    write_checkpoint(model, tensors(megabytes=50))
    for path in model.iterdir():
        path.read_bytes()
    if not cached:
        evict(model)

    def take(_: Layout) -> None:
        (small / "other").write_bytes(os.urandom(30 * MB))

    with pytest.raises(InsufficientMemory):
        load_segment(model, "thaw-test", on_index=take)
    assert [p.name for p in small.iterdir()] == ["other"]
    (small / "other").unlink()
    load_segment(model, "thaw-test")
