"""Keep recently listed sources for the load that follows.

The load then lists no files and reads no header a second time.
"""

from __future__ import annotations

import threading

from weights.tiers.port import Tier


class ListedTiers:
    """Open tiers by revision; thread-safe.

    Each tier is taken once, or dropped by the process that offered it.
    """

    def __init__(self) -> None:
        self._tiers: dict[str, Tier] = {}
        self._lock = threading.Lock()

    def offer(self, revision: str, tier: Tier) -> None:
        """Offer `tier`, which is closed unless it is taken."""
        with self._lock:
            before, self._tiers[revision] = self._tiers.get(revision), tier
        if before is not None:
            before.close()

    def take(self, revision: str) -> Tier | None:
        """Take the tier; the caller closes it."""
        with self._lock:
            return self._tiers.pop(revision, None)

    def drop(self, revision: str) -> None:
        """Close the tier if it was not taken."""
        if (tier := self.take(revision)) is not None:
            tier.close()
