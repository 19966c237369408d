"""An entry of the SSD cache as a tier: it is not evicted while the tier is open."""

from __future__ import annotations

from weights.cache.store import EntryHandle
from weights.tiers.directory import DirectoryTier


class CachedTier(DirectoryTier):
    def __init__(self, entry: EntryHandle) -> None:
        super().__init__(entry.directory, source=entry.record.source, revision=entry.record.revision)
        self._entry = entry

    def close(self) -> None:
        self._entry.release()
