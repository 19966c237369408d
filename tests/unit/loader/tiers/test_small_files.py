"""Small files of a remote model.

They are synced before they are named, and fetched again if they do not match.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any, cast

import pytest

from shared.errors import CheckpointInvalid
from shared.private import write_durably
from weights.sources.sources import _point as point
from weights.tiers.headers import bring_small_files
from weights.tiers.port import Tier, TierFile

CONFIG = b'{"model_type": "llama"}'


class Source:
    """A tier with one small file that counts its reads."""

    def __init__(self, content: bytes = CONFIG, sha256: str | None = None) -> None:
        self.source, self.content, self.reads = "hf://org/model", content, 0
        self.file = TierFile("config.json", len(content), sha256=sha256)

    def files(self) -> list[TierFile]:
        return [self.file]

    def read(self, file: TierFile, offset: int, into: memoryview, cancelled: Any = None) -> None:
        self.reads += 1
        into[:] = self.content


def bring(source: Source, directory: Path) -> int:
    """Return the number of reads that fetching the files took."""
    before = source.reads
    bring_small_files(cast(Tier, source), directory, trust_remote_code=False)
    assert (directory / "config.json").read_bytes() == source.content
    return source.reads - before


@pytest.mark.parametrize("sha256", [None, hashlib.sha256(CONFIG).hexdigest()])
@pytest.mark.parametrize("damage", [b"", bytes(len(CONFIG)), CONFIG[:-1], CONFIG[:-1] + b"]"])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, damage: bytes, sha256: str | None) -> None:
    source = Source(sha256=sha256)
    assert bring(source, tmp_path) == 1
    assert bring(source, tmp_path) == 0
    (tmp_path / "config.json").write_bytes(damage)
    assert bring(source, tmp_path) == 1
    assert bring(source, tmp_path) == 0


def test_file_without_a_known_checksum_is_fetched_once_more(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(bytes(len(CONFIG)))
    source = Source()
    assert [bring(source, tmp_path), bring(source, tmp_path)] == [1, 0]


def test_file_with_a_wrong_checksum_is_not_kept(tmp_path: Path) -> None:
    source = Source(sha256="0" * 64)
    with pytest.raises(CheckpointInvalid, match="SHA-256"):
        bring_small_files(cast(Tier, source), tmp_path, trust_remote_code=False)
    assert not (tmp_path / "config.json").exists()


def test_bytes_are_synced_before_the_name_and_the_name_before_the_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    sync, rename = os.fsync, Path.replace

    def fsync(fd: int) -> None:
        steps.append("sync directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "sync file")
        sync(fd)

    def replace(self: Path, target: Path) -> Path:
        steps.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_durably(tmp_path / "file", b"x")
    assert steps == ["sync file", "rename", "sync directory"]
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_two_loaders_may_name_a_directory_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "by-source" / "digest"
    make = Path.symlink_to

    def make_between(self: Path, target: Path) -> None:
        make(self, target)
        monkeypatch.undo()
        point(link, tmp_path / "of-another-loader")

    monkeypatch.setattr(Path, "symlink_to", make_between)
    point(link, tmp_path / "own")
    assert link.readlink() == tmp_path / "own"
    assert [path.name for path in link.parent.iterdir()] == ["digest"]


def test_a_link_that_cannot_be_replaced_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "digest").mkdir()
    with pytest.raises(OSError, match="directory"):
        point(tmp_path / "digest", tmp_path / "own")
    assert [path.name for path in tmp_path.iterdir()] == ["digest"]
