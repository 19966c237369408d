"""A model's directory that changes while it is listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import CheckpointInvalid
from tests.unit.loader.checkpoints import write_checkpoint
from weights.sources.local_models import OwnDirectories
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
