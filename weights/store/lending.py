"""Lend the pages of a device to KV caches (ADR 0056).

Each borrower has booked a floor of pages, and keeps pages beyond it until others need them. If a
load needs pages and none are free, it reports how many; the service asks borrowers to shrink, and
the load waits for their pages. A borrower below its floor reports a shortage in the same way.
During a shortage the lender lends no page beyond a floor.

If a borrower's floor does not suffice for any sequence, the borrower asks for a turn. The borrower
that asked first has the turn: the pages of its turn are guaranteed like a floor, until it ends the
turn or asks for another one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from weights.store.memory import UnitMemory
from weights.store.pages import Cost, Keep, Store, give_back, keep_none, lend, lendable_pages

log = logging.getLogger(__name__)
_LOAD_WAITS_S = 20.0
"""A load waits this long for pages that borrowers return."""


def shrink_targets(held: Mapping[str, int], floors: Mapping[str, int], short: int) -> dict[str, int]:
    """Return the number of pages that each borrower keeps when `short` pages are to be returned.

    The borrower with most pages beyond its floor returns pages first. If all floors are reached,
    the borrowers return fewer than `short`.
    """
    excess = {b: max(0, held.get(b, 0) - floor) for b, floor in floors.items()}
    targets: dict[str, int] = {}
    for borrower in sorted(excess, key=lambda b: (-excess[b], b)):
        given = min(short, excess[borrower])
        if given > 0:
            targets[borrower] = held[borrower] - given
            short -= given
    return targets


class Turn(NamedTuple):
    """A turn that a borrower waits for or has: its number and the pages needed."""

    number: int
    pages: int


@dataclass(frozen=True)
class Borrower:
    """A KV cache.

    Attributes:
        floor: Booked pages.
        instance_id: The instance of the cache; empty: unknown.
        model: Name of the instance's model; empty: unknown.
        pid: The process that maps the pages; None: unknown.
        wanted: Total number of pages that the borrower asks for.
        ceiling: The most pages that the cache may have, of which all caches share the part beyond
            their floors; None: unknown.
        is_open: True while the borrower is connected. A process may still map the pages of a
            disconnected one.
    """

    floor: int
    instance_id: str = ""
    model: str = ""
    pid: int | None = None
    wanted: int = 0
    is_open: bool = True
    ceiling: int | None = None


class LendingDevice(Protocol):
    """The device whose pages are lent.

    Attributes:
        changed: Guards the store.
    """

    @property
    def changed(self) -> threading.Condition: ...
    def store(self) -> Store: ...
    def replace_store(self, store: Store) -> None: ...
    def keep(self) -> Keep: ...
    def cost(self) -> Cost: ...
    def now(self) -> float: ...


@dataclass
class Lender:
    """Pages lent from one device. Methods may be called from any thread.

    Attributes:
        is_limited: The lender lends no more than is booked for KV caches: free pages may be booked
            for something else (ADR 0107).
        on_change: Called when pages may have become free or a load needs pages, in any thread, with
            the device's lock held.
    """

    device: LendingDevice
    memory: UnitMemory
    is_limited: bool = False
    on_change: Callable[[], None] = lambda: None
    _borrowers: dict[str, Borrower] = field(default_factory=dict)
    _turns: dict[str, Turn] = field(default_factory=dict)
    _short: dict[str, tuple[int, float]] = field(default_factory=dict)

    # -- borrowers ---------------------------------------------------------------------------------

    def open(self, name: str, borrower: Borrower) -> None:
        """Add a borrower, which has no pages yet."""
        with self.device.changed:
            self._borrowers[name] = borrower

    @property
    def borrowers(self) -> Mapping[str, Borrower]:
        """Return all borrowers by name. The caller has the device's lock."""
        return dict(self._borrowers)

    def lend(self, borrower: str, wanted: int, turn: Turn | None = None) -> tuple[int, ...]:
        """Lend pages until `borrower` has `wanted` pages or no page is left.

        The lender reclaims reusable units as needed. Lent pages have no memory.

        Args:
            borrower: The borrower's name.
            wanted: Total number of pages that the borrower asks for.
            turn: The turn that the borrower waits for or has.

        Returns:
            The additional pages.

        Raises:
            EngineFailed: The device is a GPU, and the borrower's process has exited.
        """
        with self.device.changed:
            self._note_turn(borrower, turn)
            self._change(borrower, wanted=wanted)
            store = self.device.store()
            had = store.lent.get(borrower, ())
            if self._short:
                wanted = min(wanted, self._count_guaranteed().get(borrower, 0))
            more = wanted - len(had)
            if more <= 0:
                self.end_shortage(borrower)
                return ()
            keep = self.device.keep() if more > len(store.free) else keep_none
            store = self.device.store()  # pages of earlier loaders may be free now
            more = min(lendable_pages(store, more, keep), self._count_unlent_bookings())
            self._note_lacking(borrower, len(had) + more, wanted)
            found = lend(store, borrower, more, self.device.cost(), keep) if more > 0 else None
            if found is None:
                return ()
            store, reclaimed = found
            granted = store.lent[borrower][len(had) :]
            known = self._borrowers.get(borrower)
            self.memory.claim(granted, known.pid if known is not None else None)
            self.memory.free(granted)
            self.device.replace_store(store)
        if reclaimed:
            log.info("reclaimed units for a KV cache", extra={"borrower": borrower, "units": len(reclaimed)})
        return granted

    def _note_turn(self, borrower: str, turn: Turn | None) -> None:
        """Add a borrower to the queue for turns, or end its turn."""
        first, before = next(iter(self._turns), None), self._turns.get(borrower)
        if before is not None and (turn is None or turn.number != before.number):
            del self._turns[borrower]
        if turn is not None and borrower in self._borrowers:
            self._turns[borrower] = turn
        if next(iter(self._turns), None) != first:
            self.notify()

    def _count_guaranteed(self) -> dict[str, int]:
        """Return the pages of each borrower that others cannot ask for."""
        first = next(iter(self._turns), None)
        floors = {name: b.floor for name, b in self._borrowers.items() if b.is_open}
        return {b: max(floor, self._turns[b].pages) if b == first else floor for b, floor in floors.items()}

    def _count_unlent_bookings(self) -> int:
        """Return how many more pages may be lent: all floors and the largest growth are booked."""
        if not self.is_limited:
            return self.device.store().count
        known = [b for b in self._borrowers.values() if b.is_open]
        growth = max((b.ceiling - b.floor for b in known if b.ceiling is not None), default=0)
        return max(0, sum(b.floor for b in known) + max(0, growth) - self.device.store().lent_pages)

    def _change(self, borrower: str, **values: Any) -> None:
        if borrower in self._borrowers:
            self._borrowers[borrower] = replace(self._borrowers[borrower], **values)

    def _note_lacking(self, borrower: str, held: int, wanted: int) -> None:
        """Start or end the shortage of a borrower that wants guaranteed pages and has fewer."""
        lacking = min(wanted, self._count_guaranteed().get(borrower, 0)) - held
        if lacking <= 0:
            self.end_shortage(borrower)
        elif self._short.get(borrower, (0, 0.0))[0] != lacking:
            self.begin_shortage(borrower, lacking, self.device.now())

    def take_back(self, borrower: str, pages: Collection[int] | None = None) -> int:
        """Take back `pages` (None: all) that no process maps.

        Where mappings cannot be seen, returned pages are free on the borrower's word.

        Returns:
            The number of pages that `borrower` still has.
        """
        with self.device.changed:
            had = self.device.store().lent.get(borrower, ())
            chosen = had if pages is None else [p for p in had if p in pages]
            if pages is not None:
                self.memory.unclaim(chosen)
            mapped = self.memory.mapped_among(chosen)
            returned = [p for p in chosen if p not in mapped]
            if returned:
                self.device.replace_store(give_back(self.device.store(), borrower, returned))
                self.notify()
            self._forget_closed(borrower)
            return len(had) - len(returned)

    def close(self, borrower: str) -> None:
        """End a borrower. Its pages stay lent until they are taken back."""
        with self.device.changed:
            self._note_turn(borrower, None)
            self._change(borrower, is_open=False, wanted=0)
            self.end_shortage(borrower)
            self._forget_closed(borrower)

    def _forget_closed(self, borrower: str) -> None:
        known = self._borrowers.get(borrower)
        if known is not None and not known.is_open and borrower not in self.device.store().lent:
            del self._borrowers[borrower]

    def has_turn(self, borrower: str) -> bool:
        with self.device.changed:
            return next(iter(self._turns), None) == borrower

    def has_shortage(self, borrower: str) -> bool:
        """True if the borrower has less than it is guaranteed and wants."""
        with self.device.changed:
            return borrower in self._short

    def target(self, borrower: str) -> int | None:
        """Return how many pages `borrower` is to keep while a load lacks pages; None: all."""
        with self.device.changed:
            held = {b: len(p) for b, p in self.device.store().lent.items()}
            return shrink_targets(held, self._count_guaranteed(), sum(pages for pages, _ in self._short.values())).get(borrower)

    # -- loads -------------------------------------------------------------------------------------

    def wait_for_pages(self, load: str, short: int) -> bool:
        """Wait for pages that borrowers return. The caller has the device's lock.

        Returns:
            False if borrowers do not have so many to return, or did not within the time.
        """
        now = self.device.now()
        _, since = self._short.get(load, (0, now))
        held = {b: len(p) for b, p in self.device.store().lent.items()}
        excess = sum(max(0, held.get(b, 0) - floor) for b, floor in self._count_guaranteed().items())
        if excess < short or now - since >= _LOAD_WAITS_S:
            self.end_shortage(load)
            return False
        self.begin_shortage(load, short, since)
        self.device.changed.wait(_LOAD_WAITS_S - (now - since))
        return True

    def begin_shortage(self, name: str, pages: int, since: float = 0.0) -> None:
        """Ask borrowers for `pages` that a load or borrower lacks. The caller has the lock."""
        self._short[name] = (pages, since)
        self.notify()

    def end_shortage(self, load: str) -> None:
        """Forget that a load lacked pages. The caller has the device's lock."""
        if self._short.pop(load, None) is not None:
            self.notify()

    def notify(self) -> None:
        """Notify that pages may be free. The caller has the device's lock."""
        self.device.changed.notify_all()
        self.on_change()
