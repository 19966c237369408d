"""Where models come from: a directory, or the Hugging Face hub. A source says what a model is, and brings its files onto this host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from services.loader.adapters.hub import HubSource, is_hub
from services.loader.format.checkpoint import directory_revision, open_checkpoint
from services.loader.format.inspect import check_small_files, describe
from shared.contracts.models import ModelInfo
from shared.errors import CheckpointInvalid, InvalidModel


class Source(Protocol):
    """One model's files. Both calls block; they run in threads of the shell."""

    def inspect(self, *, trust_remote_code: bool) -> ModelInfo:
        """What the model is. Raises `InvalidModel` and its kin, or `Unavailable` if the source cannot be reached."""
        ...

    def fetch(self, on_fetched: Callable[[int], None], cancelled: threading.Event, *, trust_remote_code: bool) -> Path:
        """The directory where all files lie; `on_fetched(bytes)` tells what has come so far. Raises `Cancelled` as well."""
        ...

    def small_file(self, name: str) -> Path | None:
        """Where one of the model's small files lies on this host, if it does; nothing is fetched for it."""
        ...


class DirectorySource:
    """A directory in Hugging Face layout (a snapshot of its cache, with its symbolic links, is one)."""

    def __init__(self, source: str) -> None:
        self.directory = Path(source).expanduser()
        if not self.directory.is_absolute():
            raise InvalidModel(f"{source} is neither an absolute directory nor hf://org/name[@revision]", param="source")

    def inspect(self, *, trust_remote_code: bool) -> ModelInfo:
        directory = self._checked()
        present = _names(directory)
        architecture, config = check_small_files(directory, present, trust_remote_code=trust_remote_code)
        checkpoint = open_checkpoint(directory)
        return describe(str(directory), directory_revision(checkpoint, config), architecture, checkpoint, directory, present)

    def fetch(self, on_fetched: Callable[[int], None], cancelled: threading.Event, *, trust_remote_code: bool) -> Path:
        return self._checked()

    def small_file(self, name: str) -> Path | None:
        path = self.directory / name
        return path if path.is_file() else None

    def _checked(self) -> Path:
        if not self.directory.exists():
            raise CheckpointInvalid(f"{self.directory} does not exist on this node; copy the model there or correct its source")
        if not self.directory.is_dir():
            raise CheckpointInvalid(f"{self.directory} is not a directory; source is the directory that holds config.json")
        return self.directory.resolve()


def _names(directory: Path) -> frozenset[str]:
    try:
        return frozenset(p.name for p in directory.iterdir())
    except OSError as e:
        raise CheckpointInvalid(f"{directory} cannot be listed: {e.strerror}; give the loader's user access") from e


def source_of(source: str) -> Source:
    """The source that a model's `source` names. Raises `InvalidModel` if it names none."""
    return HubSource.parse(source) if is_hub(source) else DirectorySource(source)
