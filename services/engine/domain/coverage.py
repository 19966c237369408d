"""Byte ranges that have arrived."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Coverage:
    """A set of bytes, kept as ranges that neither touch nor overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add [start, end); bytes that are there already are fine."""
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def has(self, start: int, end: int) -> bool:
        """True if every byte of [start, end) is there."""
        at = bisect_right(self._starts, start) - 1
        return start >= end or (at >= 0 and self._ends[at] >= end)
