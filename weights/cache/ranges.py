"""Byte ranges of a file that are present."""

from __future__ import annotations

import bisect


class RangeSet:
    """Disjoint byte ranges, in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Bytes from `start` up to, not including, `end`."""
        if start >= end:
            return
        low = bisect.bisect_left(self._ends, start)
        high = bisect.bisect_right(self._starts, end)
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]

    def covers(self, start: int, end: int) -> bool:
        if start >= end:
            return True
        at = bisect.bisect_right(self._starts, start) - 1
        return at >= 0 and end <= self._ends[at]

    def list_missing(self, size: int) -> list[tuple[int, int]]:
        """The gaps (start, end) of a file of `size` bytes."""
        gaps, at = [], 0
        for start, end in zip(self._starts, self._ends, strict=True):
            if at < min(start, size):
                gaps.append((at, min(start, size)))
            at = end
        if at < size:
            gaps.append((at, size))
        return gaps

    @property
    def total(self) -> int:
        return sum(self._ends) - sum(self._starts)
