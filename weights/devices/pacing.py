"""Slow copies down to a given bandwidth, for experiments on machines without that link.

A paced link is never faster than its pace; it may be slower, where the machine is.
"""

from __future__ import annotations


class Pacer:
    """One link of a given bandwidth, whose copies follow one another."""

    def __init__(self, bytes_per_second: float) -> None:
        if bytes_per_second <= 0:
            raise ValueError(f"{bytes_per_second} bytes/s: a pace must be over 0")
        self.bytes_per_second = bytes_per_second
        self._free_at = 0.0

    def book(self, nbytes: int, now: float) -> float:
        """Return when a copy of `nbytes` ends that may begin at `now` (monotonic seconds)."""
        self._free_at = max(self._free_at, now) + nbytes / self.bytes_per_second
        return self._free_at
