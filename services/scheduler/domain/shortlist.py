"""Which devices are worth a closer look: those on which the model might soonest be ready, best first.

One cheap pass over the bookings; only the best are considered in full and kept in the plan. The order is that of the branches
of placement.py:

 A. It fits now. Exact: the first of the list is the best there is.
 B. It fits once those that leave already have left. Exact too.
 C. It may fit once idle instances have left; the device whose longest idle instance is idle the longest goes first.
 D. It may fit once instances that serve have left.
 E. It cannot fit now, or nothing may be placed there: shown to people if there is nothing better.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest

from services.scheduler.domain.booking import Booking
from services.scheduler.domain.draft import Draft
from services.scheduler.domain.estimates import Forecast

SHORTLIST = 8
"""So many devices are considered at a time; if there are no more, simply all of them."""


def shortlists(d: Draft, need: int, avoid: tuple[str, ...], forecast: Forecast) -> Iterator[list[Booking]]:
    """Devices for `need` bytes, best first, as lists to be gone through until one has a place."""
    devices = d.state.bookings.values()
    if len(devices) <= SHORTLIST:
        yield list(devices)
        return
    usable = [b for b in devices if not b.closed]
    if d.state.pauses:
        usable = [b for b in usable if not d.paused(b.key)]
    for fitting in ([b for b in usable if b.free >= need], [b for b in usable if b.coming >= need]):
        if fitting:  # A, B
            soonest = [(b.key in avoid, ms, b.free, b) for b, ms in zip(fitting, forecast.totals(fitting), strict=True)]
            yield [b for *_, b in nsmallest(SHORTLIST, soonest)]
            return
    possible = [b for b in usable if b.coming + b.movable >= need]
    if not possible:  # E
        yield nsmallest(SHORTLIST, devices, key=lambda b: (bool(b.closed), -b.coming, b.key))
        return
    durations = forecast.totals(possible)
    ranked = [
        (b.coming + b.idle < need, b.key in avoid, ms, b.idle_since, b) for b, ms in zip(possible, durations, strict=True)
    ]  # C, D
    yield [b for *_, b in nsmallest(SHORTLIST, ranked)]
    ranked.sort()
    for start in range(SHORTLIST, len(ranked), SHORTLIST):
        yield [b for *_, b in ranked[start : start + SHORTLIST]]
