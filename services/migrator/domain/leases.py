"""Which migration to take up: one that nobody works on.

A lease is over when its record has not changed for `LEASE_S` by this process's own clock; clocks of two machines are never compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shared.contracts.migration import LEASE_S, MigrationRecord


@dataclass(frozen=True, slots=True)
class Watched:
    """A record, and since when it is as it is (seconds of this process's clock)."""

    record: MigrationRecord
    since: float


@dataclass(slots=True)
class Leases:
    """What is known of the bucket."""

    watched: dict[str, Watched] = field(default_factory=dict)

    def saw(self, record: MigrationRecord, now: float) -> None:
        old = self.watched.get(record.migration_id)
        if record.over:
            self.watched.pop(record.migration_id, None)
        elif old is None or old.record != record:
            self.watched[record.migration_id] = Watched(record, now)

    def forget(self, migration_id: str) -> None:
        self.watched.pop(migration_id, None)

    def replace(self, records: Iterable[MigrationRecord], now: float) -> None:
        """The whole bucket was read. What is as it was keeps its time."""
        found = {r.migration_id: r for r in records}
        for gone in self.watched.keys() - found.keys():
            self.forget(gone)
        for record in found.values():
            self.saw(record, now)


def claimable(watched: Mapping[str, Watched], refused: Mapping[str, float], now: float) -> MigrationRecord | None:
    """The oldest that nobody works on. `refused`: until when to leave one alone that somebody else has just been faster at."""
    free = [
        w.record
        for w in watched.values()
        if (not w.record.owner or now - w.since > LEASE_S) and refused.get(w.record.migration_id, 0.0) <= now
    ]
    return min(free, key=lambda r: (r.created, r.migration_id), default=None)


def next_look(watched: Mapping[str, Watched], now: float) -> float | None:
    """When the first lease will be over, if nothing changes."""
    return min((w.since + LEASE_S for w in watched.values() if w.record.owner and w.since + LEASE_S > now), default=None)
