"""Simulated time: jobs by due time, then by order of creation."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Job = Callable[[], None]


class Timer:
    """A scheduled job; `cancel` prevents it."""

    __slots__ = ("job",)

    def __init__(self, job: Job) -> None:
        self.job: Job | None = job

    def cancel(self) -> None:
        self.job = None


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = 0

    def at(self, when: float, job: Job) -> Timer:
        self._numbers += 1
        timer = Timer(job)
        heappush(self._heap, (when, self._numbers, timer))
        return timer

    def call_later(self, seconds: float, job: Job) -> Timer:
        return self.at(self.now + seconds, job)

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Run until no job is left or `until` returns True."""
        heap = self._heap
        while heap:
            when, _, timer = heappop(heap)
            job = timer.job
            if job is None:
                continue
            self.now = when
            job()
            if until is not None and until():
                return
