"""An entry of the SSD cache as a tier: a directory that is held while it is open."""

from __future__ import annotations

from weights.cache.store import Hold
from weights.tiers.directory import DirectoryTier


class HeldTier(DirectoryTier):
    def __init__(self, hold: Hold) -> None:
        super().__init__(hold.directory, source=hold.record.source, revision=hold.record.revision)
        self._hold = hold

    def close(self) -> None:
        self._hold.release()
