"""The leader's copy of the bucket of migrations."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.errors import TimeoutError as NatsTimeoutError

from services.scheduler.adapters import clock, migrations
from services.scheduler.adapters.migrations import Migrations
from services.scheduler.adapters.outbox import Outbox
from services.scheduler.domain.effects import CancelMigration, OrderMigration
from services.scheduler.domain.events import Event, MigrationUpdated
from shared.contracts.base import ErrorBody
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


class Bucket:
    """A bucket with one order.

    Attributes:
        answers: False: it does not answer questions.
    """

    def __init__(self) -> None:
        self.stored = record("m-1", "asked")
        self.answers = True

    async def get(self, _: str) -> SimpleNamespace:
        if not self.answers:
            raise NatsTimeoutError
        return SimpleNamespace(value=self.stored.model_dump_json().encode(), revision=1)

    async def update(self, _: str, value: bytes, *, last: int) -> None:
        assert last == 1
        self.stored = MigrationRecord.model_validate_json(value)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    bucket = Bucket()

    async def opened(*_: Any, **__: Any) -> Bucket:
        return bucket

    monkeypatch.setattr(migrations, "migrations_bucket", opened)
    return bucket


async def call_off(judged: MigrationRecord) -> None:
    mesh = cast(Mesh, SimpleNamespace(nc=SimpleNamespace(jetstream=lambda timeout: None), replicas=1))
    async with asyncio.timeout(5.0):
        await Migrations(mesh, lambda _: None).call_off(judged, Unavailable("no migrator").body())


async def test_cancellation_is_dropped_if_the_bucket_does_not_answer(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    """Its owner cannot renew its lease meanwhile; repeated, it would forestall the owner."""
    judged, bucket.answers = bucket.stored, False
    await call_off(judged)
    assert [r.getMessage() for r in caplog.records] == ["failed to cancel a migration"]
    bucket.answers = True
    assert bucket.stored == judged
    await call_off(judged)
    assert bucket.stored.state == "cancelled"


async def test_order_that_a_migrator_has_changed_is_not_cancelled(bucket: Bucket) -> None:
    judged, bucket.stored = bucket.stored, bucket.stored.model_copy(update={"owner": "m"})
    await call_off(judged)
    assert (bucket.stored.state, bucket.stored.owner) == ("asked", "m")


class BlockedOrders:
    """A bucket that takes no orders.

    Attributes:
        called_off: Migrations whose cancellation was attempted.
    """

    def __init__(self) -> None:
        self.called_off: asyncio.Queue[str] = asyncio.Queue()

    async def order(self, _: MigrationRecord) -> None:
        await asyncio.Event().wait()

    async def call_off(self, judged: MigrationRecord, _: ErrorBody) -> None:
        self.called_off.put_nowait(judged.migration_id)


async def test_cancellation_does_not_wait_for_orders_that_are_being_written() -> None:
    """It would be carried out when the bucket answers again, before the owner's next write."""
    blocked = BlockedOrders()
    nothing: Any = None
    outbox = Outbox(nothing, nothing, nothing, nothing, nothing, nothing, 1.0, cast(Migrations, blocked), nothing, nothing)
    error = Unavailable("no migrator").body()
    outbox.carry_out([OrderMigration(record("m-1", "asked")), CancelMigration(record("m-2", "preparing"), error)], clock.now())
    async with asyncio.timeout(5.0):
        assert await blocked.called_off.get() == "m-2"
    await outbox.close()
