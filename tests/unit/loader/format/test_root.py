"""Unreadable paths: each reader reports the path, with a remedy."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.contracts.models import ModelSpec
from shared.errors import CheckpointInvalid
from tests.support.unprivileged import unprivileged
from tests.unit.loader.checkpoints import write_checkpoint
from weights.convert.job import convert
from weights.formats.foreign import describe_foreign
from weights.formats.root import expand_user
from weights.formats.verify import verify
from weights.load import load_private, ready_pool
from weights.streaming import TensorStream
from weights.tiers.directory import DirectoryTier

Door = Callable[[Path], object]
DOORS: dict[str, Door] = {
    "load": load_private,
    "ready": ready_pool,
    "stream": lambda path: list(TensorStream(path)),
    "convert": lambda path: convert(path, Path("/tmp/never-made")),
    "verify": verify,
    "register": lambda path: DirectoryTier.open_source(str(path)),
    "register for a foreign engine": lambda path: describe_foreign(ModelSpec(name="m", source=str(path), engine="vllm")),
}


@pytest.fixture(params=list(DOORS.values()), ids=list(DOORS))
def door(request: pytest.FixtureRequest) -> Door:
    chosen: Door = request.param
    return chosen


@pytest.fixture
def closed() -> Iterator[Path]:
    """Create a model in a directory that only its owner can enter."""
    with tempfile.TemporaryDirectory(prefix="thaw-test-", dir="/tmp") as directory:
        write_checkpoint(Path(directory) / "m")
        Path(directory).chmod(0o700)
        yield Path(directory) / "m"


def test_inaccessible_parent_directory_is_reported(door: Door, closed: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, to become another user")
    message = rf"{closed}.* cannot be looked at: Permission denied; correct the path, or the permissions"
    with unprivileged(), pytest.raises(CheckpointInvalid, match=message):
        door(closed)


def test_a_name_too_long(door: Door, tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=r"aaa cannot be looked at: File name too long|aaa/thaw.index.json cannot be"):
        door(tmp_path / ("a" * 300))


def test_links_in_a_circle(door: Door, tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / "one")
    with pytest.raises(CheckpointInvalid, match=r"one.* cannot be looked at: Too many levels of symbolic links"):
        door(tmp_path / "one")


def test_missing_path_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none", tmp_path / "file" / "m", Path("/m\0")):
        with pytest.raises(CheckpointInvalid, match="does not exist"):
            load_private(path)


def test_a_user_without_a_passwd_entry() -> None:
    with pytest.raises(CheckpointInvalid, match="unknown user"):
        expand_user("~nobody-of-that-name/m")


def test_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointInvalid, match=r"/config\.json is missing"):
        _ = DirectoryTier(tmp_path).revision
