"""Destinations that cannot be written, for several users."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import CheckpointInvalid, Conflict, ThawError, Unavailable
from tests.support.unprivileged import unprivileged
from tests.unit.loader.checkpoints import write_checkpoint
from tests.unit.loader.convert.models import same, some_weights, stored, write_torch
from weights.convert.disk import disk_error
from weights.convert.job import convert
from weights.formats.checkpoint import open_checkpoint


def test_existing_or_unwritable_destination_is_refused(tmp_path: Path) -> None:
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
    with pytest.raises(Unavailable, match="No directory can be made in /proc"):
        convert(source, Path("/proc/x"))


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENAMETOOLONG, "choose a shorter name"), (errno.EMFILE, "ulimit -n"), (errno.EIO, "check the disk")]
)
def test_disk_errors_have_a_remedy(code: int, remedy: str) -> None:
    error = disk_error(Path("/out/x"), OSError(code, os.strerror(code)))
    assert error.message.startswith(f"/out/x could not be written: {os.strerror(code)}; ")
    assert remedy in error.message


@pytest.fixture
def anybodys() -> Iterator[Path]:
    """Return a directory that every user can enter.

    pytest's own does not qualify: another user's run of pytest closes the parent directory.
    """
    with tempfile.TemporaryDirectory(prefix="thaw-test-", dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def test_missing_permissions_are_reported(anybodys: Path) -> None:
    source = write_torch(anybodys / "m", some_weights())
    write_checkpoint(anybodys / "closed")
    (anybodys / "closed" / "model.safetensors").chmod(0)
    (anybodys / "shut").mkdir(mode=0o555)
    (anybodys / "open").mkdir()
    (anybodys / "open").chmod(0o777)
    with unprivileged():
        with pytest.raises(CheckpointInvalid, match=r"closed/model.safetensors cannot be read: Permission denied"):
            open_checkpoint(anybodys / "closed")
        with pytest.raises(Unavailable, match=r"Permission denied; name a directory that you may write to"):
            convert(source, anybodys / "shut" / "out")
        convert(source, anybodys / "open" / "out")


def test_concurrent_conversion_to_the_same_destination_is_refused(tmp_path: Path) -> None:
    source = write_torch(tmp_path / "m", some_weights())
    refused: list[ThawError] = []

    def progress(stage: str, done: int, total: int) -> None:
        if not refused:
            with pytest.raises(Conflict, match="Another process is converting") as caught:
                convert(source, tmp_path / "out")
            refused.append(caught.value)

    convert(source, tmp_path / "out", progress=progress)
    assert refused
    assert same(some_weights(), stored(tmp_path / "out"))
