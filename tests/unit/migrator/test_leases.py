"""Selection and time of the migrations that a migrator takes up."""

from __future__ import annotations

from services.migrator.domain.leases import LONGEST_REFUSED_S, REFUSED_S, Leases, find_claimable, next_look
from shared.contracts.migration import LEASE_S
from tests.unit.migrator.records import record


def test_the_oldest_unclaimed_migration_is_claimed() -> None:
    leases = Leases()
    leases.replace([record(2), record(1), record(0, owner="x"), record(-1, state="done")], 10.0)
    assert find_claimable(leases, 10.0) == record(1)
    leases.refuse(record(1), 10.0)
    assert find_claimable(leases, 10.0) == record(2)


def test_lease_expires_if_its_record_does_not_change() -> None:
    leases = Leases()
    leases.record_seen(record(1, owner="x"), 10.0)
    assert find_claimable(leases, 10.0 + LEASE_S) is None
    assert next_look(leases, 10.0) == 10.0 + LEASE_S
    leases.record_seen(record(1, owner="x", beats=1), 12.0)
    assert find_claimable(leases, 10.1 + LEASE_S) is None
    leases.record_seen(record(1, owner="x", beats=1), 14.0)  # repeated, as after a reconnection: no change
    assert find_claimable(leases, 12.1 + LEASE_S) == record(1, owner="x", beats=1)
    assert next_look(leases, 12.1 + LEASE_S) is None


def test_finished_or_deleted_records_are_forgotten() -> None:
    leases = Leases()
    leases.replace([record(1), record(2)], 1.0)
    leases.record_seen(record(1, state="failed"), 2.0)
    leases.replace([], 3.0)
    assert leases.watched == {}


def test_refused_claim_backs_off_until_the_record_changes() -> None:
    leases, now, waits = Leases(), 10.0, []
    leases.record_seen(record(1), now)
    for _ in range(9):
        assert find_claimable(leases, now) == record(1)
        leases.refuse(record(1), now)
        assert find_claimable(leases, now) is None
        look = next_look(leases, now)
        assert look is not None
        waits.append(look - now)
        now = look
    assert waits[:4] == [REFUSED_S, 2 * REFUSED_S, 4 * REFUSED_S, 8 * REFUSED_S]
    assert waits[-2:] == [LONGEST_REFUSED_S, LONGEST_REFUSED_S]
    leases.refuse(record(1), now)
    leases.record_seen(record(1), now)  # repeated: no change
    assert find_claimable(leases, now) is None
    leases.record_seen(record(1, beats=1), now)
    assert find_claimable(leases, now) == record(1, beats=1)
    leases.refuse(record(1, beats=1), now)
    assert next_look(leases, now) == now + REFUSED_S


def test_unavailable_bucket_does_not_lengthen_the_backoff() -> None:
    leases = Leases()
    leases.record_seen(record(1), 0.0)
    for now in (0.0, 1.0, 3.0):
        leases.refuse(record(1), now)
    leases.refuse(record(1), 10.0, away=True)
    assert next_look(leases, 10.0) == 10.0 + REFUSED_S


def test_refusal_of_an_outdated_record_is_ignored() -> None:
    leases = Leases()
    leases.record_seen(record(1), 0.0)
    leases.record_seen(record(1, beats=1), 1.0)
    leases.refuse(record(1), 1.0)
    assert find_claimable(leases, 1.0) == record(1, beats=1)
    leases.forget("m-1")
    leases.refuse(record(1, beats=1), 1.0)
    assert leases.refused == {}
