"""The transaction of one decision: each step sees the changes of the steps before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.scheduler.domain.effects import Effect
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.booking import Booking
from services.scheduler.domain.state.booking_index import BookingTable, BookingView, DueTimes
from services.scheduler.domain.state.changes import Change, Drop, Put, apply, put, table
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Entity, Instance, key_of
from services.scheduler.domain.state.overlay import Overlay
from services.scheduler.domain.state.volatile import Counter, InstanceReport, Unschedulable
from shared.contracts.plans import PlanRecord

T = TypeVar("T")
TOKENS_PER_EPOCH = 2**32
MAX_KEY = "\U0010ffff"
_RECORDS: tuple[type[Entity], ...] = (PlanRecord, Unschedulable)
"""Records about models that wait; no placement depends on them."""


@dataclass
class Transaction:
    origin: ClusterState
    now: float
    policy: Policy
    changes: list[Put | Drop] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    plans: list[PlanRecord] = field(default_factory=list)
    _memo: dict[Hashable, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = self.origin.overlay()

    def put(self, entity: Entity) -> None:
        if put(self.state, entity):
            self.changes.append(Put(entity))
            self._forget(type(entity))

    def drop(self, kind: type[Entity], key: str) -> None:
        if key not in table(self.state, kind):
            return
        change = Drop(kind, key)
        apply(self.state, (change,))
        self.changes.append(change)
        self._forget(kind)

    def memoize(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return `compute()`, computed once for each key until this decision changes the state.

        Many waiting models are placed in one decision, most without success.

        Args:
            key: Identifies the result.
            compute: A function of the state, the time, the policy and the key, but not of plans,
                nor of the models that wait for room.
        """
        if key not in self._memo:
            self._memo[key] = compute()
        found: T = self._memo[key]
        return found

    def _forget(self, kind: type[Entity]) -> None:
        if self._memo and not issubclass(kind, _RECORDS):
            self._memo.clear()

    def net_changes(self) -> tuple[Change, ...]:
        """Return the changes, only the last one of each entity."""
        last: dict[tuple[type[Entity], str], Change] = {}
        for change in self.changes:
            subject = (type(change.entity), key_of(change.entity)) if isinstance(change, Put) else (change.kind, change.key)
            last.pop(subject, None)
            last[subject] = change
        return tuple(last.values())

    def changed_devices(self) -> tuple[str, ...]:
        """Return the keys of devices whose bookings may have changed."""
        bookings = self.state.bookings
        return bookings.written if type(bookings) is Overlay else ()

    def bookings(self) -> BookingView:
        """Return the present bookings with their orders."""
        changed: dict[str, Booking | None] = {}
        below: Mapping[str, Booking] = self.state.bookings
        while type(below) is Overlay:
            changed |= {key: self.state.bookings.get(key) for key in below.written}
            below = below.below
        return BookingView(below if type(below) is BookingTable else BookingTable(below.items()), changed)

    def due_instances(self) -> list[Instance]:
        """Return the instances that the passing of time may change, the longest due first."""
        changed: set[str] = set()
        below: Mapping[str, float] = self.state.deadlines
        while isinstance(below, Overlay):
            changed.update(below.written)
            below = below.below
        order = below.order if isinstance(below, DueTimes) else sorted((due, key) for key, due in below.items())
        end = bisect_right(order, (self.now, MAX_KEY))
        found = [(due, key) for due, key in order[:end] if key not in changed]
        found += [(due, key) for key in changed if (due := self.state.deadlines.get(key)) is not None and due <= self.now]
        return [self.state.instances[key] for _, key in sorted(found)]

    def original(self, kind: type[Entity], key: str) -> Entity | None:
        """Return an entity as it was before this decision."""
        found: Entity | None = table(self.origin, kind).get(key)
        return found

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def next_number(self) -> int:
        """Return the next number of this epoch."""
        counter = Counter(self.numbers_issued() + 1)
        self.state.get_writable("counter")[counter.key] = counter
        self.changes.append(Put(counter))
        return counter.value

    def numbers_issued(self) -> int:
        """Return how many numbers this epoch has issued."""
        return self.state.counter.get("counter", Counter(0)).value

    def next_token(self) -> int:
        """Return a fencing token larger than every earlier one."""
        return self.state.epoch * TOKENS_PER_EPOCH + self.next_number()

    def is_cooling_down(self, subject: str) -> bool:
        pause = self.state.cooldowns.get(subject)
        return pause is not None and pause.until > self.now

    def idle_since(self, instance_id: str) -> float | None:
        """Return since when an instance is idle; None while it serves or has not been reported."""
        report: InstanceReport | None = self.state.reports.get(instance_id)
        return report.idle_since if report else None

    def is_stuck(self, instance_id: str) -> bool:
        """True if an instance should have left long ago, so that nothing waits for its memory."""
        report: InstanceReport | None = self.state.reports.get(instance_id)
        return report is not None and report.is_stuck
