"""Which migration to take up: one that nobody works on.

A lease is over when its record has not changed for `LEASE_S` by this process's own clock; clocks of two machines are never compared.
One that could not be claimed is left alone for a while, twice as long each time, until it changes: the bucket forgets an old record without
telling those that watch it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.contracts.migration import LEASE_S, MigrationRecord

REFUSED_S = 0.5
"""After the first claim that failed."""
LONGEST_REFUSED_S = 30.0


@dataclass(frozen=True, slots=True)
class Watched:
    """A record, and since when it is as it is (seconds of this process's clock)."""

    record: MigrationRecord
    since: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """A claim that failed: the record is left alone for `wait` seconds, `until` then (of this process's clock)."""

    until: float
    wait: float


@dataclass(slots=True)
class Leases:
    """What is known of the bucket. `refused`: by the id of a record that is still as it was when it could not be claimed."""

    watched: dict[str, Watched] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)

    def saw(self, record: MigrationRecord, now: float) -> None:
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
        """It could not be claimed. `away`: the bucket could not be asked, which says nothing of the record."""
        there = self.watched.get(record.migration_id)
        if there is not None and there.record == record:
            before = None if away else self.refused.get(record.migration_id)
            self.refused[record.migration_id] = refusal(before, now)

    def replace(self, records: Iterable[MigrationRecord], now: float) -> None:
        """The whole bucket was read. What is as it was keeps its time."""
        found = {r.migration_id: r for r in records}
        for gone in self.watched.keys() - found.keys():
            self.forget(gone)
        for record in found.values():
            self.saw(record, now)


def refusal(before: Refusal | None, now: float) -> Refusal:
    """What follows a claim that failed, `before` being what followed the last one."""
    wait = min(2 * before.wait, LONGEST_REFUSED_S) if before is not None else REFUSED_S
    return Refusal(now + wait, wait)


def claimable(leases: Leases, now: float) -> MigrationRecord | None:
    """The oldest that nobody works on, but for those that are left alone."""
    left_alone = {name for name, refused in leases.refused.items() if refused.until > now}
    free = [
        w.record for name, w in leases.watched.items() if (not w.record.owner or now - w.since > LEASE_S) and name not in left_alone
    ]
    return min(free, key=lambda r: (r.created, r.migration_id), default=None)


def next_look(leases: Leases, now: float) -> float | None:
    """When the first lease, or the first time to leave a record alone, will be over, if nothing changes."""
    ends = [w.since + LEASE_S for w in leases.watched.values() if w.record.owner]
    return min((t for t in (*ends, *(r.until for r in leases.refused.values())) if t > now), default=None)
