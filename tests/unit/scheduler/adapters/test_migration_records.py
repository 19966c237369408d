"""The leader's copy of the bucket of migrations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.errors import TimeoutError as NatsTimeoutError

from services.scheduler.adapters import clock, migrations
from services.scheduler.adapters.migrations import Migrations
from services.scheduler.domain.events import Event, MigrationUpdated
from shared.contracts.migration import MIGRATION_KEPT_S, MigrationRecord, MigrationState
from shared.errors import Unavailable
from shared.messaging import Mesh


def record(name: str, state: MigrationState = "done") -> MigrationRecord:
    return MigrationRecord(
        migration_id=name,
        token=1,
        model="m",
        revision="r",
        source_instance="i-1",
        source_node="n1",
        instance_id="i-2",
        node="n2",
        created=0.0,
        state=state,
    )


def test_expired_records_are_dropped_from_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(clock, "now", lambda: now)
    events: list[Event] = []
    copy = Migrations(cast(Mesh, None), events.append)
    for found in (record("old"), record("stuck", "preparing"), record("busy", "preparing")):
        copy.put(found.migration_id, found.model_dump_json().encode())
    now += MIGRATION_KEPT_S / 2
    copy.put("busy", record("busy", "handing_over").model_dump_json().encode())
    now += MIGRATION_KEPT_S / 2 + 1
    copy.put("new", record("new").model_dump_json().encode())
    assert {r.migration_id for r in copy.list_latest(None, 100)} == {"busy", "new"}
    # A migration without changes for so long has no worker: its waiting clients get an end.
    states = [(e.record.migration_id, e.record.state) for e in events if isinstance(e, MigrationUpdated)]
    assert states[-1] == ("stuck", "cancelled")
    assert ("old", "cancelled") not in states


class UnansweringBucket:
    """A bucket with one order, which does not answer the first question."""

    def __init__(self) -> None:
        self.stored = record("m-1", "asked")
        self.questions = 0

    async def get(self, _: str) -> SimpleNamespace:
        self.questions += 1
        if self.questions == 1:
            raise NatsTimeoutError
        return SimpleNamespace(value=self.stored.model_dump_json().encode(), revision=1)

    async def update(self, _: str, value: bytes, *, last: int) -> None:
        assert last == 1
        self.stored = MigrationRecord.model_validate_json(value)


async def test_cancellation_is_repeated_until_the_bucket_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader orders it once: else the source could not be moved until the record expires."""
    bucket = UnansweringBucket()

    async def opened(*_: Any, **__: Any) -> UnansweringBucket:
        return bucket

    monkeypatch.setattr(migrations, "migrations_bucket", opened)
    mesh = cast(Mesh, SimpleNamespace(nc=SimpleNamespace(jetstream=lambda timeout: None), replicas=1))
    await Migrations(mesh, lambda _: None).call_off(bucket.stored, Unavailable("no migrator").body())
    assert bucket.stored.state == "cancelled"


async def test_order_that_a_migrator_has_changed_is_not_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = UnansweringBucket()
    judged, bucket.stored = bucket.stored, bucket.stored.model_copy(update={"owner": "m"})

    async def opened(*_: Any, **__: Any) -> UnansweringBucket:
        return bucket

    monkeypatch.setattr(migrations, "migrations_bucket", opened)
    mesh = cast(Mesh, SimpleNamespace(nc=SimpleNamespace(jetstream=lambda timeout: None), replicas=1))
    await Migrations(mesh, lambda _: None).call_off(judged, Unavailable("no migrator").body())
    assert (bucket.stored.state, bucket.stored.owner) == ("asked", "m")
