"""Requests that came for a model lately, as the scheduler's autoscaler wants them (HydraServe §6.1)."""

from __future__ import annotations

from collections import deque

from shared.contracts.demand import ARRIVALS_WINDOW_S

WINDOWS = 8
"""So many whole windows are looked back upon for the fullest."""


class Arrivals:
    """Of one model. Times are seconds of any clock that never goes back."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self._counts: deque[tuple[int, int]] = deque(maxlen=WINDOWS + 1)
        """Windows that follow each other without overlap, by number, with what came in each; those in which nothing came are left out."""

    def came(self, now: float) -> None:
        self._forget(now)
        self._times.append(now)
        number = int(now // ARRIVALS_WINDOW_S)
        if self._counts and self._counts[-1][0] == number:
            self._counts[-1] = (number, self._counts[-1][1] + 1)
        else:
            self._counts.append((number, 1))

    def window(self, now: float) -> int:
        """Requests of the last window, which ends now."""
        self._forget(now)
        return len(self._times)

    def peak(self, now: float) -> int:
        """Requests of the fullest of the last whole windows."""
        present = int(now // ARRIVALS_WINDOW_S)
        return max([count for number, count in self._counts if present - WINDOWS <= number < present], default=0)

    def idle(self, now: float) -> bool:
        """Whether there is nothing left to tell."""
        return not self.window(now) and not self.peak(now)

    def _forget(self, now: float) -> None:
        while self._times and self._times[0] <= now - ARRIVALS_WINDOW_S:
            self._times.popleft()
