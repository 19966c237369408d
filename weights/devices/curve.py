"""Find the copy size beyond which larger copies are not faster.

The functions are pure and use measured points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB
PROBE_SIZES = tuple(64 * KIB * 2**i for i in range(11))
"""64 KiB to 64 MiB."""
NEAR_PEAK = 0.95
FALLBACK_BYTES = 2 * MIB
"""The elbow that Torpor (section 4.3) reports for its PCIe bus: taken where nothing could be
measured.
"""


@dataclass(frozen=True)
class Point:
    """Copies of `nbytes`, one after the other, brought `bytes_per_second`."""

    nbytes: int
    bytes_per_second: float


def find_elbow(points: Sequence[Point], near_peak: float = NEAR_PEAK) -> int:
    """Return the least size from which on every copy reaches `near_peak` of the best.

    Sizes are the measured ones; the result is `FALLBACK_BYTES` without points. A small size that is
    fast by chance does not count while a larger one is slow. The largest sizes are excepted: some
    buses are slower again beyond their peak, and only the rise matters there.
    """
    known = sorted((p for p in points if p.nbytes > 0 and p.bytes_per_second > 0), key=lambda p: p.nbytes)
    if not known:
        return FALLBACK_BYTES
    peak = max(known, key=lambda p: p.bytes_per_second)
    best = peak.nbytes
    for point in reversed([p for p in known if p.nbytes <= peak.nbytes]):
        if point.bytes_per_second < near_peak * peak.bytes_per_second:
            break
        best = point.nbytes
    return best


def cap_curve(points: Sequence[Point], bytes_per_second: float | None) -> list[Point]:
    """Return the curve of a link that brings at most `bytes_per_second`; None: without a limit."""
    return [Point(p.nbytes, min(p.bytes_per_second, bytes_per_second or p.bytes_per_second)) for p in points]
