"""Places that were asked what they have a moment ago, for the load that follows: it lists nothing and reads no header a second time."""

from __future__ import annotations

import threading

from weights.tiers.port import Tier


class ListedTiers:
    """By revision; each is taken once, or dropped by whoever offered it. From any thread."""

    def __init__(self) -> None:
        self._tiers: dict[str, Tier] = {}
        self._lock = threading.Lock()

    def offer(self, revision: str, tier: Tier) -> None:
        """`tier` is handed over: it is closed unless it is taken."""
        with self._lock:
            before, self._tiers[revision] = self._tiers.get(revision), tier
        if before is not None:
            before.close()

    def take(self, revision: str) -> Tier | None:
        """The caller is to close it."""
        with self._lock:
            return self._tiers.pop(revision, None)

    def drop(self, revision: str) -> None:
        """Nobody will take it any more."""
        if (tier := self.take(revision)) is not None:
            tier.close()
