"""The files of a model that several places have, behind the SSD cache (ADR 0089)."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from weights.cache.caching import CachingTier
from weights.sources.failover import FailoverTier
from weights.tiers.port import TierFile


class StripedFiles:
    """Reads each range from a given place; the cache verifies and keeps it."""

    def __init__(self, cache: CachingTier, far: FailoverTier) -> None:
        self._cache, self._far = cache, far

    @property
    def source(self) -> str:
        return self._cache.source

    def files(self) -> Sequence[TierFile]:
        return self._cache.files()

    def read_local(self, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event | None = None) -> bool:
        return self._cache.read_local(file, offset, into, cancelled)

    def read_place(self, place: int, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event | None) -> None:
        self._far.read_place(place, file, offset, into, cancelled)

    def keep(self, file: TierFile, offset: int, data: memoryview, *, is_local: bool) -> None:
        self._cache.keep(file, offset, data, is_local=is_local)
