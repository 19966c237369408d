"""Which migration is taken up, and when."""

from __future__ import annotations

from services.migrator.domain.leases import Leases, claimable, next_look
from shared.contracts.migration import LEASE_S, MigrationRecord


def record(number: int, **more: object) -> MigrationRecord:
    fields = {
        "migration_id": f"m-{number}",
        "token": number,
        "model": "m",
        "revision": "r",
        "source_instance": "a",
        "source_node": "n",
        "instance_id": "b",
        "node": "n",
        "created": float(number),
    }
    return MigrationRecord.model_validate(fields | more)


def test_the_oldest_that_nobody_works_on() -> None:
    leases = Leases()
    leases.replace([record(2), record(1), record(0, owner="x"), record(-1, state="done")], 10.0)
    assert claimable(leases.watched, {}, 10.0) == record(1)
    assert claimable(leases.watched, {"m-1": 11.0}, 10.0) == record(2)


def test_a_lease_is_over_when_nothing_has_changed_for_its_time() -> None:
    leases = Leases()
    leases.saw(record(1, owner="x"), 10.0)
    assert claimable(leases.watched, {}, 10.0 + LEASE_S) is None
    assert next_look(leases.watched, 10.0) == 10.0 + LEASE_S
    leases.saw(record(1, owner="x", beats=1), 12.0)
    assert claimable(leases.watched, {}, 10.1 + LEASE_S) is None
    leases.saw(record(1, owner="x", beats=1), 14.0)  # told again, as after a reconnection: nothing has changed
    assert claimable(leases.watched, {}, 12.1 + LEASE_S) == record(1, owner="x", beats=1)
    assert next_look(leases.watched, 12.1 + LEASE_S) is None


def test_what_is_over_or_gone_is_forgotten() -> None:
    leases = Leases()
    leases.replace([record(1), record(2)], 1.0)
    leases.saw(record(1, state="failed"), 2.0)
    leases.replace([], 3.0)
    assert leases.watched == {}
