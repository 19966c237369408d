"""Fetches that share the link of a node equally (HydraServe §4.2, Eq. 3 and 4).

N fetches share the bandwidth B, so that pending bytes fall by B/N each second (Eq. 4). A node
accepts one more fetch only if no other one misses its deadline by it. Eq. 3, S_i <= B/(N+1) · (D_i
- T), is sufficient for that; `late_fetches` follows Eq. 4 to the end of each fetch, so that a small
fetch is accepted where a large one is not. A fetch that is late anyway refuses none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.scheduler.domain.values import value


@value(frozen=True, slots=True)
class PendingFetch:
    """A fetch on a link.

    Attributes:
        nbytes: S_i.
        left_s: D_i - T, the seconds until its deadline; infinite: it has no objective.
    """

    nbytes: float
    left_s: float = math.inf


def finish_times(sizes: Sequence[float], bandwidth: float) -> list[float]:
    """Return the seconds until each fetch ends if they share the bandwidth equally (Eq. 4)."""
    times = [0.0] * len(sizes)
    elapsed = fetched = 0.0
    for ended, i in enumerate(sorted(range(len(sizes)), key=lambda i: sizes[i])):
        elapsed += (sizes[i] - fetched) * (len(sizes) - ended) / bandwidth
        fetched, times[i] = sizes[i], elapsed
    return times


def late_fetches(pending: Sequence[PendingFetch], nbytes: float, bandwidth: float) -> list[int]:
    """Return the fetches that meet their deadlines, and would not with one more.

    Args:
        pending: The fetches on the link.
        nbytes: Bytes of the new one.
        bandwidth: Bytes per second of the link.
    """
    sizes = [f.nbytes for f in pending]
    before, after = finish_times(sizes, bandwidth), finish_times([*sizes, nbytes], bandwidth)
    return [i for i, f in enumerate(pending) if before[i] <= f.left_s < after[i]]


def meets_eq_3(pending: Sequence[PendingFetch], bandwidth: float) -> bool:
    """Check Eq. 3 for every fetch: S_i <= B/(N+1) · (D_i - T)."""
    each = bandwidth / (len(pending) + 1)
    return all(f.nbytes <= each * f.left_s for f in pending)


def pending_now(nbytes: float, bandwidth: float, fetches: int, seconds: float) -> float:
    """Return Eq. 4: the pending bytes S_i - B/N · (T - T') of one of N fetches; 0: it has ended."""
    return max(0.0, nbytes - bandwidth / fetches * max(0.0, seconds))
