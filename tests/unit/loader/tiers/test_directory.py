"""A model's directory that changes while it is listed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.errors import CheckpointInvalid
from tests.unit.loader.checkpoints import write_checkpoint
from weights.formats import checkpoint
from weights.formats.checkpoint import Checkpoint
from weights.sources.local_models import OwnDirectories
from weights.tiers import directory as tier
from weights.tiers.directory import DirectoryTier


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose configuration is removed as soon as it has been listed."""
    write_checkpoint(tmp_path / "m")
    is_file = Path.is_file

    def is_file_until_now(self: Path) -> bool:
        found = is_file(self)
        if self.name == "config.json":
            self.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "is_file", is_file_until_now)
    return tmp_path / "m"


def test_a_file_that_is_removed_meanwhile_is_reported(directory: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="cannot be listed"):
        DirectoryTier(directory).files()


def test_such_a_model_is_not_shared_and_others_are(directory: Path) -> None:
    own = OwnDirectories()
    own.remember("0" * 32, directory)
    assert own.sizes() == []


def test_headers_of_a_directory_of_another_revision_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a copy of a model of another node, or of the hub. Statuses list directories often."""
    write_checkpoint(tmp_path / "m")
    opened: list[Path] = []

    def open_every_rank(path: Path) -> Checkpoint:
        opened.append(path)
        return checkpoint.open_every_rank(path)

    monkeypatch.setattr(tier, "open_every_rank", open_every_rank)
    own = OwnDirectories()
    own.record_loaded("0" * 32, tmp_path / "m")
    for _ in range(2):
        assert own.find("0" * 32) is None
    assert len(opened) == 1
    os.utime(tmp_path / "m" / "model.safetensors", (1, 1))
    assert own.find("0" * 32) is None
    assert len(opened) == 2


def test_directories_are_listed_once_a_second(tmp_path: Path) -> None:
    now = 100.0
    own = OwnDirectories(lambda: now)
    models = [tmp_path / "a", tmp_path / "b"]
    for model in models:
        write_checkpoint(model)
        own.remember(DirectoryTier(model).revision, model)
    assert [d for _, d, _ in own.sizes()] == [str(m) for m in models]
    (models[0] / "config.json").unlink()
    assert len(own.sizes()) == 2
    now += 1.0
    assert [d for _, d, _ in own.sizes()] == [str(models[1])]
    write_checkpoint(tmp_path / "c")
    own.record_loaded(DirectoryTier(tmp_path / "c").revision, tmp_path / "c")
    assert len(own.sizes()) == 2, "it is new"
