"""Choose the entries of the SSD cache to evict for another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CacheEntry:
    """One model on the SSD.

    Attributes:
        used: Unix seconds of its last use.
        in_use: Loads read it, or one fills it.
        due: Bytes that a partial one will have besides.
    """

    revision: str
    nbytes: int
    used: float
    pinned: bool = False
    in_use: bool = False
    complete: bool = True
    due: int = 0

    @property
    def claim(self) -> int:
        return self.nbytes + self.due


def plan_eviction(entries: Sequence[CacheEntry], needed: int, budget: int, free: int) -> tuple[str, ...] | None:
    """Choose revisions to evict for `needed` bytes.

    The bytes must fit the `budget` of all entries and the disk's `free` bytes. Partial entries go
    first, then the least recently used; never a pinned revision or one in use.

    Returns:
        The revisions; None if evicting all of them would not suffice.
    """
    if needed > budget:
        return None
    total, gone = sum(e.claim for e in entries), []
    free -= sum(e.due for e in entries)
    for entry in sorted(entries, key=lambda e: (e.complete, e.used)):
        if total + needed <= budget and needed <= free:
            break
        if entry.pinned or entry.in_use:
            continue
        gone.append(entry.revision)
        total -= entry.claim
        free += entry.claim
    return tuple(gone) if total + needed <= budget and needed <= free else None
