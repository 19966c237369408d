"""Counts of recent arrivals, for the scheduler's autoscaler (HydraServe §6.1)."""

from __future__ import annotations

from collections import deque

from shared.contracts.demand import ARRIVALS_WINDOW_S

WINDOWS = 8
"""Complete windows among which the peak is sought."""


class Arrivals:
    """Arrivals of one model. Times are seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self._counts: deque[tuple[int, int]] = deque(maxlen=WINDOWS + 1)
        """Number and count of consecutive windows; windows without arrivals are left out."""

    def record(self, now: float) -> None:
        self._expire(now)
        self._times.append(now)
        number = int(now // ARRIVALS_WINDOW_S)
        if self._counts and self._counts[-1][0] == number:
            self._counts[-1] = (number, self._counts[-1][1] + 1)
        else:
            self._counts.append((number, 1))

    def window(self, now: float) -> int:
        """Count the arrivals of the window that ends now."""
        self._expire(now)
        return len(self._times)

    def peak(self, now: float) -> int:
        """Return the highest count among the last complete windows."""
        present = int(now // ARRIVALS_WINDOW_S)
        return max([count for number, count in self._counts if present - WINDOWS <= number < present], default=0)

    def is_idle(self, now: float) -> bool:
        """True if both counts are zero."""
        return not self.window(now) and not self.peak(now)

    def _expire(self, now: float) -> None:
        while self._times and self._times[0] <= now - ARRIVALS_WINDOW_S:
            self._times.popleft()
