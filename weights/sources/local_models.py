"""Track the directories of models that are known by revision; peers may read them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from shared.errors import CheckpointInvalid, ThawError
from weights.cache.journal import FileHead
from weights.cache.store import EntryRecord
from weights.tiers.directory import DirectoryTier

_SIZES_FOR_S = 1.0


class OwnDirectories:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know none yet. `clock` in monotonic seconds."""
        self._clock = clock
        self._sizes: tuple[float, list[tuple[str, str, int]]] | None = None
        self._known: dict[str, tuple[Path, EntryRecord | None]] = {}
        self._loaded: dict[tuple[str, Path], str] = {}
        self._others: dict[str, tuple[FileHead, ...]] = {}
        """By revision: files of its directory that are of another one.

        A copy of a directory that was registered on another node has times of its own.
        """

    def remember(self, revision: str, directory: Path) -> None:
        """Inspected just now: what was known of the revision is looked at again."""
        self._known[revision] = (directory, None)
        self._others.pop(revision, None)
        self._sizes = None

    def check(self, revision: str, found: str, directory: Path) -> None:
        """Check that a directory's weights are those that this node loaded as `revision`.

        They may differ from the registered weights: a copy on another node's disk has other times,
        and a damaged file may have been repaired. But this node must not load other weights as a
        revision that it has loaded already: cached and resident weights of one version would serve
        beside the other.

        Args:
            found: Digest of the weight files to load.

        Raises:
            CheckpointInvalid: The weights have changed since they were first loaded.
        """
        if self._loaded.setdefault((revision, directory), found) != found:
            raise CheckpointInvalid(
                f"The weights in {directory} have changed since they were first loaded; register it again (thaw models add)"
            )

    def record_loaded(self, revision: str, directory: Path) -> None:
        if revision not in self._known:
            self._known[revision] = (directory, None)
            self._sizes = None

    def find(self, revision: str) -> tuple[Path, EntryRecord] | None:
        """The directory and its files, as long as it is what it was."""
        known = self._known.get(revision)
        if known is None:
            return None
        directory, record = known
        try:
            tier = DirectoryTier(directory)
            heads = tuple(FileHead(name=f.name, size=f.size, version=f.version) for f in tier.files())
            if record is None and self._others.get(revision) != heads:
                # That reads the headers of all files, and statuses ask often.
                if tier.revision == revision:
                    record = EntryRecord(revision=revision, source=str(directory), files=heads)
                    self._known[revision] = directory, record
                else:
                    self._others[revision] = heads
        except ThawError:
            return None
        return (directory, record) if record is not None and record.files == heads else None

    def sizes(self) -> list[tuple[str, str, int]]:
        """Return (revision, directory, bytes) of those that are still there.

        What was found is at most a second old. All directories are listed for it.
        """
        now, known = self._clock(), self._sizes
        if known is not None and now - known[0] < _SIZES_FOR_S:
            return known[1]
        found = []
        for revision in list(self._known):
            own = self.find(revision)
            if own is not None:
                found.append((revision, str(own[0]), sum(f.size for f in own[1].files)))
        self._sizes = (now, found)
        return found
