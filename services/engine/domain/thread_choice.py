"""The number of threads for steps of one token, chosen by what steps take.

A step of one token multiplies each matrix by one row. More threads share that work, and cost a
wake-up for each matrix. Which is faster depends on the model, on the machine, and on the other
processes that use its cores, so the engine compares one thread with all of them now and then:

1. Trials compare the two numbers in turn, for `PAIRS` pairs of steps.
2. A trial ends sooner if the slower number is far slower, so that few tokens are late.
3. All threads are used if they are faster by `MARGIN`, else one thread, which leaves cores to
   others.
4. Each trial that confirms the choice doubles the number of steps until the next one, up to
   `MOST_STEPS`; one that changes the choice sets it back to `FIRST_STEPS`.
"""

from __future__ import annotations

from statistics import median

PAIRS = 8
LEAST_PAIRS = 3
"""Pairs of steps before a trial may end sooner: fewer may all be disturbed by other processes."""
MARGIN = 1.03
FAR = 2.0
"""A number of threads is far slower if its fastest step takes this many times the other's."""
FIRST_STEPS = 64
"""Steps between two trials at first. The first ones may wait for weights that still arrive."""
MOST_STEPS = 4096


class ThreadChoice:
    """Chooses between one thread and `threads`. Call `pick`, then `record`, for each step."""

    def __init__(self, threads: int) -> None:
        """Begin with all threads.

        Args:
            threads: Threads that the engine may use; at least 2.
        """
        self.threads = threads
        self.chosen = threads
        self._interval = self._left = FIRST_STEPS
        self._durations: dict[int, list[float]] = {}

    def pick(self) -> int:
        """Return the number of threads for the next step."""
        if self._left > 0:
            return self.chosen
        single, full = self._trial()
        return 1 if len(single) < len(full) or (len(single) == len(full) and self.chosen == 1) else self.threads

    def record(self, threads: int, duration_s: float) -> None:
        """Record the duration of a step that used the number of threads that `pick` returned."""
        if self._left > 0:
            self._left -= 1
            return
        self._trial()[threads > 1].append(duration_s)
        single, full = self._trial()
        if len(single) != len(full):
            return
        ratio = min(single) / min(full)
        if len(single) < PAIRS and (len(single) < LEAST_PAIRS or 1 / FAR < ratio < FAR):
            return
        before, self.chosen = self.chosen, self.threads if median(full) * MARGIN < median(single) else 1
        self._interval = min(self._interval * 2, MOST_STEPS) if self.chosen == before else FIRST_STEPS
        self._left = self._interval
        self._durations.clear()

    def _trial(self) -> tuple[list[float], list[float]]:
        """Return the durations with one thread and with all of them."""
        return self._durations.setdefault(1, []), self._durations.setdefault(self.threads, [])
