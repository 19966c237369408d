"""Check the bytes of reused units: all of them, or a sample of those not checked lately."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Sequence

from shared.contracts.segment import SegmentTensor
from weights.store.arena import PagedArena
from weights.store.memory import UnitMemory
from weights.store.pages import StoredUnit
from weights.store.units import Unit, content_key

SAMPLE_BYTES = 16 * 1024 * 1024
"""Reused units of about this many bytes are checked for each arena where not all of them are."""
CHECKED_FOR_S = 60.0
"""Seconds after a check in which a sample leaves the unit out: models that are swapped in and out
would wait for the same hashes each time.
"""


class Checks:
    """The times at which units were checked. The device's lock guards it."""

    def __init__(self, *, every: bool) -> None:
        """Create it without checked units.

        Args:
            every: Check all reused units of each arena.
        """
        self._every = every
        self._checked_at: dict[str, float] = {}

    def choose(self, arena: PagedArena, stored: Collection[str], limit: int, now: float) -> list[int]:
        """Choose reused units to check: all, or those unchecked for the longest time.

        Args:
            stored: Keys of the units on the device.
            limit: Number of units to remember before those that are gone are dropped.
            now: Monotonic seconds.
        """
        chosen = [i for i in range(len(arena.units)) if i not in arena.missing]
        if not self._every:
            due = [i for i in chosen if self._last_checked(arena.keys[i]) <= now - CHECKED_FOR_S]
            due.sort(key=lambda i: self._last_checked(arena.keys[i]))
            sizes = itertools.accumulate((arena.units[i].nbytes for i in due), initial=0)
            chosen = [i for i, before in zip(due, sizes, strict=False) if before < SAMPLE_BYTES]
        self._checked_at.update(dict.fromkeys((arena.keys[i] for i in chosen), now))
        if len(self._checked_at) > limit:
            self._checked_at = {k: at for k, at in self._checked_at.items() if k in stored}
        return chosen

    def _last_checked(self, key: str) -> float:
        return self._checked_at.get(key, float("-inf"))


def key_on_device(memory: UnitMemory, stored: StoredUnit, unit: Unit, tensors: Sequence[SegmentTensor]) -> str:
    """Return the key of a unit by its bytes on the device. The caller holds the unit."""
    digests = {}
    for tensor in tensors:
        digest = hashlib.sha256()
        for view in memory.views(stored, tensor.offset - unit.offset, tensor.nbytes):
            digest.update(view)
        digests[tensor.name] = digest.hexdigest()
    return content_key(unit.offset, tensors, digests)
