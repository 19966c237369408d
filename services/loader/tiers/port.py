"""The port that every tier implements (ADR 0013): which files a model has, and ranges of them read into memory that is given."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class TierFile:
    """One file of a model. `version` changes when the content does (an ETag; size and times); `sha256` where the source tells it."""

    name: str
    size: int
    version: str = ""
    sha256: str | None = None


class Tier(Protocol):
    """All files of one model in one place. Calls block and come from several threads at once.

    Errors are `ThawError`s that name the file and the remedy: `CheckpointInvalid` (gone, changed, cut short for good), `Unavailable`
    (unreachable after the retries), `InvalidModel` (a source that cannot be meant). `Cancelled` within one read of `cancelled`.
    """

    @property
    def link(self) -> str:
        """What its reads share and are measured by, as `LinkStatus.link`."""
        ...

    def files(self) -> Sequence[TierFile]:
        """Every file of the model, sorted by name."""
        ...

    def read(self, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event | None = None) -> None:
        """Fill `into` with the bytes of `file` from `offset` on: all of them, or an error. Retries and resumes by itself.

        Raises `CheckpointInvalid` if the file is not the `version` that was listed any more.
        """
        ...

    def close(self) -> None:
        """Give back connections."""
        ...
