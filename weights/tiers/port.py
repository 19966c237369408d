"""The port that every tier implements (ADR 0013, 0020): which files a model has, and ranges of them read into memory that is given."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Cancelled(Exception):
    """The load was called off; nothing of it is wanted."""


@dataclass(frozen=True)
class TierFile:
    """One file of a model.

    `version` changes when the content does (an ETag; size and times).

    `sha256`, `md5`: in hexadecimal, if the source lists them.
    """

    name: str
    size: int
    version: str = ""
    sha256: str | None = None
    md5: str | None = None


class Tier(Protocol):
    """All files of one model in one place.

    Methods block and may be called from several threads.

    Errors are `ThawError`s that name the file and the remedy: `CheckpointInvalid` (gone, changed, cut short for good, wrong checksum),
    `Unavailable` (unreachable after the retries), `InvalidModel` (a source that cannot be meant). `Cancelled` soon after `cancelled`.
    """

    @property
    def source(self) -> str:
        """Where this is, as resolved (`ModelInfo.source`): a directory, or a URL without credentials; hf:// with its commit."""
        ...

    @property
    def revision(self) -> str:
        """A digest that changes when any file of the model does (`ModelInfo.revision`, `weights_id`). May read the listing."""
        ...

    @property
    def link(self) -> str:
        """What its reads share and are measured by, as `LinkStatus.link`."""
        ...

    @property
    def directory(self) -> Path | None:
        """The directory where all files lie on this host, for direct reads; None where there is none (then `read`)."""
        ...

    def files(self) -> Sequence[TierFile]:
        """Every file of the model, sorted by name.

        The first call may ask the source; later calls return the same list.
        """
        ...

    def read(self, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event | None = None) -> None:
        """Fill `into` with the bytes of `file` from `offset` on: all of them, or an error.

        Retries and resumes by itself.

        A tier with a cache still reads `into` after the call: the memory must hold these bytes until `close`. Raises
        `CheckpointInvalid` if the file is not the `version` that was listed any more.
        """
        ...

    def finish(self, cancelled: threading.Event | None = None) -> None:
        """After the last read of a whole load, before its bytes are trusted: wait until the checksums are verified.

        Raises `CheckpointInvalid` for a wrong one. Nothing to do where there are none.
        """
        ...

    def settled(self) -> threading.Event:
        """Set when nothing is left to do behind the reads (a cache written, or given up): `close` then drops nothing."""
        ...

    def close(self) -> None:
        """Give back connections, and memory given to `read`: it is not touched any more when this returns. May be repeated."""
        ...
