"""Which entries of the SSD cache make room for another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CacheEntry:
    """One model on the SSD. `used`: Unix seconds of its last use. `held`: loads read from it, or one is filling it. `due`: bytes that one that is
    being fetched will have besides."""

    revision: str
    nbytes: int
    used: float
    pinned: bool = False
    held: bool = False
    complete: bool = True
    due: int = 0

    @property
    def claim(self) -> int:
        return self.nbytes + self.due


def plan_eviction(entries: Sequence[CacheEntry], needed: int, budget: int, free: int) -> tuple[str, ...] | None:
    """Revisions to remove so that `needed` bytes fit both the `budget` of all entries and the disk's `free` bytes.

    The least recently used go first, of those neither pinned nor held; unfinished ones before all others. None if that is not enough:
    then nothing is removed for it.
    """
    if needed > budget:
        return None
    total, gone = sum(e.claim for e in entries), []
    free -= sum(e.due for e in entries)
    for entry in sorted(entries, key=lambda e: (e.complete, e.used)):
        if total + needed <= budget and needed <= free:
            break
        if entry.pinned or entry.held:
            continue
        gone.append(entry.revision)
        total -= entry.claim
        free += entry.claim
    return tuple(gone) if total + needed <= budget and needed <= free else None
