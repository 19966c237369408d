"""Define the port that every tier implements (ADR 0013, 0020).

A tier lists a model's files, and reads ranges of them into given memory.
"""

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

    Attributes:
        version: Changes when the content does (an ETag; size and times).
        sha256: In hexadecimal, if the source lists it.
        md5: In hexadecimal, if the source lists it.
    """

    name: str
    size: int
    version: str = ""
    sha256: str | None = None
    md5: str | None = None


class Tier(Protocol):
    """All files of one model in one place.

    Methods block and may be called from several threads.

    Errors are `ThawError`s that name the file and the remedy: `CheckpointInvalid` (gone, changed,
    cut short for good, wrong checksum), `Unavailable` (unreachable after the retries),
    `InvalidModel` (a source that cannot be meant). `Cancelled` soon after `cancelled`.
    """

    @property
    def source(self) -> str:
        """The resolved source (`ModelInfo.source`).

        It is a directory, or a URL without credentials; hf:// with its commit.
        """
        ...

    @property
    def revision(self) -> str:
        """A digest that changes with any file of the model (`ModelInfo.revision`).

        It is also the `weights_id`. The call may read the listing.
        """
        ...

    @property
    def link(self) -> str:
        """Name of the link of its reads, as in `LinkStatus.link`."""
        ...

    @property
    def directory(self) -> Path | None:
        """The directory of all files on this host, for direct reads.

        None without such a directory; use `read` then.
        """
        ...

    def files(self) -> Sequence[TierFile]:
        """Every file of the model, sorted by name.

        The first call may ask the source; later calls return the same list.
        """
        ...

    def read(self, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event | None = None) -> None:
        """Fill `into` with the bytes of `file` from `offset` on: all of them, or an error.

        Retries and resumes by itself.

        A tier with a cache still reads `into` after the call: the memory must hold these bytes
        until `close`. Raises `CheckpointInvalid` if the file is not the `version` that was listed
        any more.
        """
        ...

    def finish(self, cancelled: threading.Event | None = None) -> None:
        """Wait until the checksums of a whole load are verified.

        Call it after the last read, before the bytes are trusted. It returns at once without
        checksums.

        Raises:
            CheckpointInvalid: A checksum is wrong.
        """
        ...

    def get_settled_event(self) -> threading.Event:
        """Event that is set when no work remains behind the reads.

        The cache is then written, or given up, and `close` drops nothing.
        """
        ...

    def close(self) -> None:
        """Give back connections, and memory given to `read`; idempotent.

        The tier does not touch the memory after the return.
        """
        ...
