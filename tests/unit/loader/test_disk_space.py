"""The file system of the disk cache in the loader's status."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from services.loader.adapters.peer_sharing import Sharing
from services.loader.settings import LoaderSettings


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
