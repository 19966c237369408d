"""Check the bytes of reused units: all of them, or a sample in turn."""

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


class Checks:
    """The turns in which units were checked. The device's lock guards it."""

    def __init__(self, *, every: bool) -> None:
        """`every`: check all reused units of each arena."""
        self._every = every
        self._checked: dict[str, int] = {}

    def choose(self, arena: PagedArena, stored: Collection[str], limit: int) -> list[int]:
        """Choose reused units to check: all, or those unchecked for the longest time.

        Args:
            stored: Keys of the units on the device.
            limit: Number of turns to remember before those of other units are dropped.
        """
        reused = [i for i in range(len(arena.units)) if i not in arena.missing]
        if not self._every:
            reused.sort(key=lambda i: self._checked.get(arena.keys[i], 0))
            sizes = itertools.accumulate((arena.units[i].nbytes for i in reused), initial=0)
            reused = [i for i, before in zip(reused, sizes, strict=False) if before < SAMPLE_BYTES]
        turn = max(self._checked.values(), default=0) + 1
        self._checked.update(dict.fromkeys((arena.keys[i] for i in reused), turn))
        if len(self._checked) > limit:
            self._checked = {k: n for k, n in self._checked.items() if k in stored}
        return reused


def key_on_device(memory: UnitMemory, stored: StoredUnit, unit: Unit, tensors: Sequence[SegmentTensor]) -> str:
    """Return the key of a unit by its bytes on the device. The caller holds the unit."""
    digests = {}
    for tensor in tensors:
        digest = hashlib.sha256()
        for view in memory.views(stored, tensor.offset - unit.offset, tensor.nbytes):
            digest.update(view)
        digests[tensor.name] = digest.hexdigest()
    return content_key(unit.offset, tensors, digests)
