"""Shortlists of devices: those on which the model can be ready soonest, best first.

Only the best devices are considered in full and recorded in the plan. They are taken from the
orders that the bookings maintain (state/booking_index.py). Examined one by one are only devices
that differ from the others: those that this decision has changed, those of nodes that have started
the model or have its weights, and those where it has just failed. Nodes with busy links are after
idle ones. The order is that of the rules of place.py:

A. The model fits now. Exact: the first device is the best one. The list also has the few nodes that
   have its weights and would be sooner although idle instances must leave.
B. It fits once the stopping instances are gone. Exact too.
C. It may fit once idle instances are evicted; the device with the longest-idle instance is first.
D. It may fit once serving instances are gone.
E. It does not fit, or nothing may be placed there: for the record if nothing else is found.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from heapq import merge, nsmallest
from itertools import chain, groupby, islice
from operator import itemgetter

from services.scheduler.domain.estimates.start_times import Forecast
from services.scheduler.domain.placement.constraints import Excludes
from services.scheduler.domain.state.booking import Booking, device_key
from services.scheduler.domain.state.booking_index import BandwidthClass, Bandwidths, speed_of
from services.scheduler.domain.state.shared_weights import needed_bytes
from services.scheduler.domain.state.transaction import Transaction

SHORTLIST_SIZE = 8
"""Devices that are considered at a time; with no more devices, all of them."""
FITTING = 4
"""Devices with room: the first is the soonest, the others leave the policy a choice."""
CLEARED = 4
"""Devices to be cleared at first: their victims are examined one by one."""
_device = itemgetter(3)
Ranked = tuple[bool, float, float, Booking]
"""Has just failed there; ms until ready; free bytes or idle time; the device."""
_NONE: Iterator[Ranked] = iter(())
OfClass = Callable[[float, BandwidthClass], Iterator[Ranked]]
"""Devices of a class, best first, by the milliseconds until ready on any of them."""


def shortlists(
    tx: Transaction, need: int, avoid: tuple[str, ...], forecast: Forecast, excludes: Excludes | None = None
) -> Iterator[list[Booking]]:
    """Yield lists of devices for `need` bytes, best first, until one has a place.

    Devices that `excludes` rejects are only in the last list (E).
    """
    if len(tx.state.bookings) <= SHORTLIST_SIZE:
        yield list(tx.state.bookings.values())
        return
    search = _Search(tx, avoid, forecast, excludes)
    for fitting in (search.iter_fitting(need), search.fitting_soon(need)):
        if first := list(islice(fitting, FITTING)):  # A, B
            yield [*first, *search.sooner_with_idle_gone(need, than=first[0])]
            return
    ranked = chain(search.with_idle_gone(need), search.with_all_gone(need))  # C, D
    size, found = CLEARED, False
    while some := list(islice(ranked, size)):
        size, found = SHORTLIST_SIZE, True
        yield some
    if not found:  # E
        yield search.most_free_first()


class _Search:
    def __init__(self, tx: Transaction, avoid: tuple[str, ...], forecast: Forecast, excludes: Excludes | None) -> None:
        self._excludes = excludes
        self._paused = tx.is_cooling_down if tx.state.cooldowns else None
        self._state, self._view = tx.state, tx.bookings()
        self._avoid = avoid
        self._forecast = forecast
        self._any_busy, self._busy = bool(tx.state.links_busy_until), False
        keys = {*avoid, *self._view.changed_keys}
        for name in forecast.known_nodes:
            if (node := tx.state.nodes.get(name)) is not None:
                keys.update([device_key(name, device.device_id) for device in node.devices])
        self._apart = {key: self._view.get(key) for key in keys}

    def iter_fitting(self, need: int) -> Iterator[Booking]:
        def of_class(ms: float, known: BandwidthClass) -> Iterator[Ranked]:
            return self._open(ms, _iter_from(known.free, need)) if known.free[-1][0] >= need else _NONE

        return self._iter_best(of_class, lambda b: b.free_bytes if b.free_bytes >= self._compute_needed(b, need) else None)

    def fitting_soon(self, need: int) -> Iterator[Booking]:
        def of_class(ms: float, known: BandwidthClass) -> Iterator[Ranked]:
            if not known.leaving:
                return _NONE
            found = [b for key in known.leaving if (b := self._view.get(key)) is not None and b.free_soon_bytes >= need]
            return self._open(ms, sorted([(b.free_bytes, b.key) for b in found]))

        return self._iter_best(of_class, lambda b: b.free_bytes if b.free_soon_bytes >= self._compute_needed(b, need) else None)

    def with_idle_gone(self, need: int) -> Iterator[Booking]:
        return self._may_fit(
            lambda b: b.free_soon_bytes + b.idle_bytes >= self._compute_needed(b, need), lambda known: known.with_idle[-1] >= need
        )

    def with_all_gone(self, need: int) -> Iterator[Booking]:
        return self._may_fit(
            lambda b: b.free_soon_bytes + b.idle_bytes < self._compute_needed(b, need) <= b.free_soon_bytes + b.evictable_bytes,
            lambda known: known.with_all[-1] >= need and known.with_idle[0] < need,
        )

    def sooner_with_idle_gone(self, need: int, than: Booking) -> list[Booking]:
        """Return known nodes' devices that are ready sooner than `than` although idle instances
        leave.
        """
        if not self._forecast.known_nodes:
            return []
        limit = self._forecast.predict_ms(than, leaving=False)[1]

        def rank(b: Booking) -> float | None:
            least = self._compute_needed(b, need)
            apart = b.node in self._forecast.known_nodes and b.free_soon_bytes < least <= b.free_soon_bytes + b.idle_bytes
            return b.idle_since if apart and self._forecast.predict_ms(b, leaving=True)[1] < limit else None

        return [b for *_, b in nsmallest(CLEARED, self._distinct_devices(rank))]

    def _compute_needed(self, b: Booking, need: int) -> int:
        """Return the bytes needed on a device that may have some of the weights in use."""
        return needed_bytes(self._state, b, self._forecast.card, need)

    def most_free_first(self) -> list[Booking]:
        changed = self._view.changed
        first = [*islice(self._view.most_free_first(), SHORTLIST_SIZE), *changed]
        return nsmallest(SHORTLIST_SIZE, first, key=lambda b: (bool(b.closed_reason), -b.free_soon_bytes, b.key))

    def _may_fit(self, fits: Callable[[Booking], bool], any_fits: Callable[[BandwidthClass], bool]) -> Iterator[Booking]:
        def of_class(ms: float, known: BandwidthClass) -> Iterator[Ranked]:
            return (r for r in self._open(ms, known.idle_since) if fits(r[3])) if any_fits(known) else _NONE

        return self._iter_best(of_class, lambda b: b.idle_since if fits(b) else None)

    def _open(self, ms: float, ordered: Iterable[tuple[float, str]]) -> Iterator[Ranked]:
        """Yield the ordinary devices that are not cooling down, with or without busy links."""
        apart, paused, excludes, get = self._apart, self._paused, self._excludes, self._view.get
        for rank, key in ordered:
            if key in apart or (paused is not None and paused(key)):
                continue
            found = get(key)
            if found is None or (self._any_busy and self._forecast.has_queue(found.node) is not self._busy):
                continue
            if excludes is None or not excludes(found):
                yield False, ms, rank, found

    def _iter_best(self, of_class: OfClass, rank: Callable[[Booking], float | None]) -> Iterator[Booking]:
        """Yield the devices of all classes and the ones examined one by one, best first."""
        apart = sorted(self._distinct_devices(rank))
        return map(_device, merge(self._of_classes(of_class), apart) if apart else self._of_classes(of_class))

    def _of_classes(self, of_class: OfClass) -> Iterator[Ranked]:
        """Yield the devices class by class, the soonest first; those with busy links are last."""
        for busy in (False, True) if self._any_busy else (False,):
            self._busy = busy
            for ms, classes in groupby(self._view.fastest_first(is_remote=self._forecast.is_remote), key=self._ms_of):
                runs = [run for _, known in classes if (run := of_class(ms, known)) is not _NONE]
                if runs:
                    yield from runs[0] if len(runs) == 1 else merge(*runs)

    def _ms_of(self, known: tuple[Bandwidths, BandwidthClass]) -> float:
        return self._forecast.default_ms(speed_of(known[0], is_remote=self._forecast.is_remote))

    def _distinct_devices(self, rank: Callable[[Booking], float | None]) -> Iterator[Ranked]:
        for key, b in self._apart.items():
            if b is None or b.closed_reason or (self._paused is not None and self._paused(key)):
                continue
            if self._excludes is not None and self._excludes(b):
                continue
            if (value := rank(b)) is not None:
                yield (key in self._avoid, self._forecast.predict_ms(b, leaving=False)[1], value, b)


def _iter_from(ordered: list[tuple[int, str]], least: int) -> Iterator[tuple[int, str]]:
    return islice(ordered, bisect_left(ordered, (least, "")), None)
