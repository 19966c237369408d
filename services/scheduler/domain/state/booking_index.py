"""Bookings in sorted order, so that a decision examines few of many devices.

Usable devices are grouped by their loader's bandwidth: within a class only free memory and idle
time differ, so that the best device of a class is first in a sorted list. An update costs a binary
search and one memory move.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from services.scheduler.domain.cost.links import DEFAULT_BYTES_PER_SECOND
from services.scheduler.domain.state.booking import Booking

Bandwidths = tuple[float | None, float | None]
"""Bytes per second of a loader: in general, and from remote sources."""


@dataclass(slots=True)
class BandwidthClass:
    """Usable devices of one bandwidth. Tuples end with the device's key."""

    free: list[tuple[int, str]] = field(default_factory=list)
    idle_since: list[tuple[float, str]] = field(default_factory=list)
    with_idle: list[int] = field(default_factory=list)
    """`free_soon_bytes + idle_bytes` of each device: free if all idle instances leave."""
    with_all: list[int] = field(default_factory=list)
    """`free_soon_bytes + evictable_bytes` of each device: free if all instances leave."""
    leaving: set[str] = field(default_factory=set)
    """Devices with stopping instances."""

    def replace(self, old: Booking | None, new: Booking | None) -> None:
        _move(self.free, old and (old.free_bytes, old.key), new and (new.free_bytes, new.key))
        _move(self.idle_since, old and (old.idle_since, old.key), new and (new.idle_since, new.key))
        # `is None` tests, because 0 bytes is a valid sum.
        _move(
            self.with_idle,
            None if old is None else old.free_soon_bytes + old.idle_bytes,
            None if new is None else new.free_soon_bytes + new.idle_bytes,
        )
        _move(
            self.with_all,
            None if old is None else old.free_soon_bytes + old.evictable_bytes,
            None if new is None else new.free_soon_bytes + new.evictable_bytes,
        )
        if old is not None:
            self.leaving.discard(old.key)
        if new is not None and new.leaving_bytes:
            self.leaving.add(new.key)


class BookingTable(dict[str, Booking]):
    """A table of bookings that maintains the orders.

    Change it by item assignment, `del` and `pop`.
    """

    def __init__(self, bookings: Iterable[tuple[str, Booking]] = ()) -> None:
        super().__init__()
        self.classes: dict[Bandwidths, BandwidthClass] = {}
        self.fastest_first: list[tuple[Bandwidths, BandwidthClass]] = []
        """Classes by descending bandwidth: from local disks, and from remote sources."""
        self.fastest_remote_first: list[tuple[Bandwidths, BandwidthClass]] = []
        self.most_free_first: list[tuple[bool, int, str]] = []
        """Every device: closed ones last, then most `free_soon_bytes` first."""
        self.budgets: list[tuple[int, str]] = []
        """Budgets of reachable devices."""
        self.separate: set[str] = set()
        """Usable devices whose instances share weights."""
        for key, booking in bookings:
            self[key] = booking

    def __setitem__(self, key: str, booking: Booking) -> None:
        self._replace(self.get(key), booking)
        super().__setitem__(key, booking)

    def __delitem__(self, key: str) -> None:
        self._replace(self[key], None)
        super().__delitem__(key)

    def pop(self, key: str, default: Any = None) -> Any:
        found = self.get(key)
        if found is None:
            return default
        del self[key]
        return found

    def _replace(self, old: Booking | None, new: Booking | None) -> None:
        _move(self.most_free_first, old and _room(old), new and _room(new))
        _move(
            self.budgets,
            (old.budget_bytes, old.key) if old is not None and old.is_reachable else None,
            (new.budget_bytes, new.key) if new is not None and new.is_reachable else None,
        )
        before = None if old is None or old.closed_reason else old
        after = None if new is None or new.closed_reason else new
        if before is not None and before.is_separate:
            self.separate.discard(before.key)
        if after is not None and after.is_separate:
            self.separate.add(after.key)
        old_class, new_class = before and _speeds(before), after and _speeds(after)
        if before is not None and old_class is not None and old_class == new_class:
            self.classes[old_class].replace(before, after)
            return
        if before is not None and old_class is not None:
            known = self.classes[old_class]
            known.replace(before, None)
            if not known.free:
                del self.classes[old_class]
                self._order_classes()
        if after is not None and new_class is not None:
            if new_class not in self.classes:
                self.classes[new_class] = BandwidthClass()
                self._order_classes()
            self.classes[new_class].replace(None, after)

    def _order_classes(self) -> None:
        self.fastest_first = sorted(self.classes.items(), key=lambda c: (-speed_of(c[0]), str(c[0])))
        self.fastest_remote_first = sorted(self.classes.items(), key=lambda c: (-speed_of(c[0], is_remote=True), str(c[0])))


def _speeds(b: Booking) -> Bandwidths:
    return b.bytes_per_second, b.remote_bytes_per_second


def speed_of(speeds: Bandwidths, *, is_remote: bool = False) -> float:
    """Return the bytes per second of a load on the devices of a class."""
    local, afar = speeds
    return ((afar or local) if is_remote else local) or DEFAULT_BYTES_PER_SECOND


def _room(b: Booking) -> tuple[bool, int, str]:
    return (bool(b.closed_reason), -b.free_soon_bytes, b.key)


def _move(order: list[Any], old: Any, new: Any) -> None:
    if old == new:
        return
    if old is not None:
        del order[bisect_left(order, old)]
    if new is not None:
        insort(order, new)


class DueTimes(dict[str, float]):
    """A table of times that maintains their order.

    Change it by item assignment, `del` and `pop`.
    """

    def __init__(self, dues: Iterable[tuple[str, float]] = ()) -> None:
        super().__init__()
        self.order: list[tuple[float, str]] = []
        for key, due in dues:
            self[key] = due

    def __setitem__(self, key: str, due: float) -> None:
        old = self.get(key)
        _move(self.order, None if old is None else (old, key), (due, key))
        super().__setitem__(key, due)

    def __delitem__(self, key: str) -> None:
        _move(self.order, (self[key], key), None)
        super().__delitem__(key)

    def pop(self, key: str, default: Any = None) -> Any:
        found = self.get(key)
        if found is None:
            return default
        del self[key]
        return found


class BookingView:
    """Bookings within a decision: an ordered table, and the decision's own changes beside it."""

    def __init__(self, below: BookingTable, changed: dict[str, Booking | None]) -> None:
        """Create a view.

        Args:
            below: The ordered table before the decision.
            changed: By key, the present booking; None: the device is gone.
        """
        self._below, self._changed = below, changed

    @property
    def changed_keys(self) -> Iterable[str]:
        """Return the keys of devices whose bookings the decision may have changed."""
        return self._changed

    @property
    def changed(self) -> list[Booking]:
        return [b for b in self._changed.values() if b is not None]

    def get(self, key: str) -> Booking | None:
        return self._changed[key] if key in self._changed else self._below.get(key)

    def fastest_first(self, *, is_remote: bool) -> list[tuple[Bandwidths, BandwidthClass]]:
        return self._below.fastest_remote_first if is_remote else self._below.fastest_first

    def most_free_first(self) -> Iterator[Booking]:
        """Yield the unchanged devices, most free memory first."""
        return (self._below[key] for *_, key in self._below.most_free_first if key not in self._changed)

    def largest_budget(self) -> int:
        """Return the largest budget of a reachable device, in bytes; 0 without one."""
        kept = next((budget for budget, key in reversed(self._below.budgets) if key not in self._changed), 0)
        return max([kept, *(b.budget_bytes for b in self.changed if b.is_reachable)])

    @property
    def has_separate_devices(self) -> bool:
        """True if usable devices share weights, or did before this decision."""
        return bool(self._below.separate) or any(b.is_separate for b in self.changed)

    def most_free(self) -> int:
        """Return at least the most `free_bytes` of a usable device, in bytes; 0 without one."""
        kept = [known.free[-1][0] for known in self._below.classes.values()]
        return max([0, *kept, *(b.free_bytes for b in self.changed if not b.closed_reason)])

    def most_with_idle_gone(self) -> int:
        """Return at least the most bytes that a usable device has free once idle instances leave.

        It may be more than that, by what this decision has booked meanwhile.
        """
        kept = [known.with_idle[-1] for known in self._below.classes.values()]
        return max([0, *kept, *(b.free_soon_bytes + b.idle_bytes for b in self.changed if not b.closed_reason)])
