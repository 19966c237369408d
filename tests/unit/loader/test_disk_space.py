"""The disk cache in the loader's status: its file system, and models that cannot be read."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.loader.adapters.peer_sharing import Sharing
from services.loader.settings import LoaderSettings
from tests.support.descriptors import open_files
from weights.cache.store import SsdCache

REVISION = "a" * 32


def test_disk_of_the_cache_is_measured(tmp_path: Path) -> None:
    with contextlib.closing(Sharing(LoaderSettings(home=tmp_path / "home", peer_host=""))) as sharing:
        found = sharing.status()
    disk = shutil.disk_usage(tmp_path)
    assert found.disk_bytes == disk.total
    assert found.disk_free_bytes == pytest.approx(disk.free, abs=disk.total * 0.1)


def test_disk_of_a_cache_that_was_deleted_is_that_of_its_parent(tmp_path: Path) -> None:
    with contextlib.closing(Sharing(LoaderSettings(cache_dir=tmp_path / "cache", home=tmp_path / "home", peer_host=""))) as sharing:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        assert sharing.status().disk_bytes == shutil.disk_usage(tmp_path).total


@pytest.fixture
def unreadable() -> Iterator[Path]:
    """Yield a cache with a model that this process may not read, as if another user owned it."""
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o755)
        model = Path(root) / "entries" / REVISION
        model.mkdir(parents=True)
        (Path(root) / "locks").mkdir(mode=0o777)
        (Path(root) / "locks").chmod(0o777)
        model.chmod(0)
        was_root = os.geteuid() == 0
        if was_root:
            os.seteuid(65534)
        try:
            yield Path(root)
        finally:
            if was_root:
                os.seteuid(0)
            model.chmod(0o755)


def test_a_model_that_cannot_be_read_does_not_end_the_loader(unreadable: Path) -> None:
    cache, before = SsdCache(unreadable, 1 << 30), open_files()
    assert cache.status().models == ()
    assert cache.acquire(REVISION) is None
    assert open_files() <= before
