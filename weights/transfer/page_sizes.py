"""Choose the size of pages and the number of threads that populate memory for a load (ADR 0059).

The functions are pure; their input is measured by the load itself.

`choose(costs)`
 1. First chunk: one part with huge pages, one with small pages, to measure both.
 2. The kernel grants no huge pages: small pages.
 3. Huge pages cost more than `HUGE_LIMIT` times as much as small ones (the kernel has to move
    memory to find them): small pages.
 4. Otherwise huge pages: direct reads into them are quicker as well.

`wants_thread(…)`: if a reader waits for memory although the populating threads had time to get
ahead, one more thread populates, up to one per core.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weights.pool.memory import Pages

HUGE_LIMIT = 2.0
AHEAD = 8
"""Pieces populated beyond the last one that a reader asked for."""
_WEIGHT = 0.5
"""Share of the newest measurement in the smoothed cost."""


@dataclass(frozen=True)
class Costs:
    """Smoothed seconds per byte of populating; None: not measured.

    Attributes:
        refused: The kernel granted no huge pages.
    """

    small: float | None = None
    huge: float | None = None
    refused: bool = False


def choose(costs: Costs) -> Pages:
    """Return the kind of pages to populate next."""
    if costs.refused:
        return "small"
    if costs.huge is None:
        return "huge"
    if costs.small is None:
        return "small"
    return "small" if costs.huge > HUGE_LIMIT * costs.small else "huge"


def record_cost(costs: Costs, asked: Pages, got: Pages, nbytes: int, seconds: float) -> Costs:
    """Record that populating `nbytes` took `seconds`."""
    cost = seconds / nbytes
    if asked == "huge" and got == "small":
        return replace(costs, refused=True)
    before = costs.huge if got == "huge" else costs.small
    smoothed = cost if before is None else _WEIGHT * cost + (1 - _WEIGHT) * before
    return replace(costs, huge=smoothed) if got == "huge" else replace(costs, small=smoothed)


def wants_thread(running: int, most: int, begun: int) -> bool:
    """Return True if one more thread should populate, now that a reader waits.

    Args:
        running: Threads that populate.
        most: Their limit: cores that this process may use.
        begun: Pieces that the threads have begun.
    """
    return running < 1 or (running < most and begun >= AHEAD * running // 2)
