"""Read pieces of a load from a remote tier, straight into the pool.

A tier with a cache also writes them to the disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from shared.errors import CheckpointInvalid
from weights.formats.segment import Place, pages
from weights.pool.region import Space
from weights.tiers.port import Tier
from weights.transfer.pieces import Piece
from weights.transfer.reader import ReadStats


class TierReader:
    """Reader of the weight files of one load through `tier`.

    The tier may use the region until it is closed.
    """

    def __init__(self, tier: Tier, places: Sequence[Place], region: Space, cancelled: threading.Event | None = None) -> None:
        """Raises `CheckpointInvalid` if the tier does not list a weight file."""
        self._tier, self._region, self._cancelled = tier, region, cancelled
        listed = {file.name: file for file in tier.files()}
        missing = next((p.file.name for p in places if p.file.name not in listed), None)
        if missing is not None:
            raise CheckpointInvalid(f"{tier.source}/{missing} is gone; register the model again")
        self._files = [listed[p.file.name] for p in places]
        self._lock = threading.Lock()
        self.stats = ReadStats()

    def read(self, piece: Piece) -> None:
        self._region.populate(piece.target, pages(piece.length))
        began = time.perf_counter()
        with self._region.view(piece.target, piece.length) as into:
            self._tier.read(self._files[piece.file], piece.offset, into, self._cancelled)
        with self._lock:
            self.stats.add(ReadStats(remote=piece.length, remote_seconds=time.perf_counter() - began))

    def close(self) -> None:
        """No-op: the opener closes the tier, which may still write its copy."""
