"""Choose a migration to claim: one whose lease has expired.

A lease has expired when its record has not changed for `LEASE_S` by this process's own clock;
clocks of two machines are never compared. After a failed claim the record is skipped for a while,
twice as long each time, until it changes: the bucket expires an old record without an event for its
watchers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.contracts.migration import LEASE_S, MigrationRecord

REFUSED_S = 0.5
"""Seconds after the first failed claim."""
LONGEST_REFUSED_S = 30.0


@dataclass(frozen=True, slots=True)
class Watched:
    """A record, and since when it is unchanged (seconds of this process's clock)."""

    record: MigrationRecord
    since: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """A failed claim: the record is skipped for `wait` seconds, up to `until`.

    Attributes:
        until: Seconds of this process's clock.
    """

    until: float
    wait: float


@dataclass(slots=True)
class Leases:
    """The known content of the bucket.

    Attributes:
        refused: Failed claims by the id of a record unchanged since.
    """

    watched: dict[str, Watched] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)

    def record_seen(self, record: MigrationRecord, now: float) -> None:
        old = self.watched.get(record.migration_id)
        if record.over:
            self.forget(record.migration_id)
        elif old is None or old.record != record:
            self.watched[record.migration_id] = Watched(record, now)
            self.refused.pop(record.migration_id, None)

    def forget(self, migration_id: str) -> None:
        self.watched.pop(migration_id, None)
        self.refused.pop(migration_id, None)

    def refuse(self, record: MigrationRecord, now: float, *, away: bool = False) -> None:
        """Record a failed claim.

        Args:
            away: The bucket was unreachable, which is no evidence about the record.
        """
        there = self.watched.get(record.migration_id)
        if there is not None and there.record == record:
            before = None if away else self.refused.get(record.migration_id)
            self.refused[record.migration_id] = refusal(before, now)

    def replace(self, records: Iterable[MigrationRecord], now: float) -> None:
        """Replace everything after a full read. Unchanged records keep their time."""
        found = {r.migration_id: r for r in records}
        for gone in self.watched.keys() - found.keys():
            self.forget(gone)
        for record in found.values():
            self.record_seen(record, now)


def refusal(before: Refusal | None, now: float) -> Refusal:
    """Return the wait after a failed claim.

    Args:
        before: The wait after the last one.
    """
    wait = min(2 * before.wait, LONGEST_REFUSED_S) if before is not None else REFUSED_S
    return Refusal(now + wait, wait)


def find_claimable(leases: Leases, now: float) -> MigrationRecord | None:
    """Return the oldest record without a live lease, of those not skipped."""
    left_alone = {name for name, refused in leases.refused.items() if refused.until > now}
    free = [
        w.record for name, w in leases.watched.items() if (not w.record.owner or now - w.since > LEASE_S) and name not in left_alone
    ]
    return min(free, key=lambda r: (r.created, r.migration_id), default=None)


def next_look(leases: Leases, now: float) -> float | None:
    """Return when the first lease or skip expires if nothing changes."""
    ends = [w.since + LEASE_S for w in leases.watched.values() if w.record.owner]
    return min((t for t in (*ends, *(r.until for r in leases.refused.values())) if t > now), default=None)
