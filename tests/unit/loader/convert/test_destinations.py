"""Destinations that cannot be written, and by whom."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from services.loader.convert.job import convert
from services.loader.format.checkpoint import open_checkpoint
from shared.errors import CheckpointInvalid, Conflict, ThawError, Unavailable
from tests.unit.loader.checkpoints import write_checkpoint
from tests.unit.loader.convert.models import same, some_weights, stored, write_torch


def test_a_destination_that_is_taken(tmp_path: Path) -> None:
    source = write_torch(tmp_path / "m", some_weights())
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out")  # an empty directory may be there
    before = stored(tmp_path / "out")
    with pytest.raises(Conflict, match="is there already"):
        convert(source, tmp_path / "out")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(Conflict, match="is there already"):
            convert(source, tmp_path / name)
    assert stored(tmp_path / "out") == before
    with pytest.raises(Unavailable, match="does not exist; make it first"):
        convert(source, tmp_path / "no" / "such")


@pytest.fixture
def unprivileged(tmp_path: Path) -> Iterator[Path]:
    """A directory for a user who is not root."""
    for parent in takewhile(lambda p: not p.stat().st_mode & 0o001, (tmp_path, *tmp_path.parents)):
        parent.chmod(0o755)
    if os.geteuid() != 0:
        yield tmp_path
        return
    os.seteuid(65534)
    try:
        yield tmp_path
    finally:
        os.seteuid(0)


def test_no_permission(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = write_torch(tmp_path / "m", some_weights())
    write_checkpoint(tmp_path / "closed")
    (tmp_path / "closed" / "model.safetensors").chmod(0)
    (tmp_path / "shut").mkdir(mode=0o555)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    request.getfixturevalue("unprivileged")
    with pytest.raises(CheckpointInvalid, match=r"closed/model.safetensors cannot be read: Permission denied"):
        open_checkpoint(tmp_path / "closed")
    with pytest.raises(Unavailable, match=r"Permission denied; name a directory that you may write to"):
        convert(source, tmp_path / "shut" / "out")
    convert(source, tmp_path / "open" / "out")


def test_two_conversions_to_one_destination(tmp_path: Path) -> None:
    source = write_torch(tmp_path / "m", some_weights())
    refused: list[ThawError] = []

    def progress(stage: str, done: int, total: int) -> None:
        if not refused:
            with pytest.raises(Conflict, match="another process is converting") as caught:
                convert(source, tmp_path / "out")
            refused.append(caught.value)

    convert(source, tmp_path / "out", progress=progress)
    assert refused
    assert same(some_weights(), stored(tmp_path / "out"))
