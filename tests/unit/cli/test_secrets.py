"""Credentials of a mesh in containers: kept from run to run, through power cuts too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from thaw.secrets import make_secrets


def files_of(directory: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in directory.rglob("*") if path.is_file()}


def test_credentials_are_on_the_disk_before_they_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    sync = os.fsync

    def record(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        sync(fd)

    monkeypatch.setattr(os, "fsync", record)
    make_secrets(tmp_path, {"node-0": "node-0"})
    written = files_of(tmp_path)
    assert tmp_path / "postgres" / "password" in written
    assert [path for path in written if path.stat().st_ino not in synced] == []
    assert {path.stat().st_mode & 0o777 for path in written} == {0o644}


def test_a_second_run_keeps_all_credentials(tmp_path: Path) -> None:
    make_secrets(tmp_path, {"node-0": "node-0"})
    before = files_of(tmp_path)
    make_secrets(tmp_path, {"node-0": "node-0"})
    assert files_of(tmp_path) == before
