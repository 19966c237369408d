"""The migrator's loop, with a bucket and engines in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from nats.js.errors import KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from services.migrator.adapters.records import Held, Records
from services.migrator.adapters.telemetry import Metrics
from services.migrator.domain.events import Ask, Forget
from services.migrator.domain.work import Options
from services.migrator.loop import Migrator
from shared.contracts.base import Message
from shared.contracts.migration import MigrationRecord, RequestsListed
from shared.tasks import end

ME = "me"


def order(number: int) -> MigrationRecord:
    return MigrationRecord(
        migration_id=f"m-{number}",
        token=number,
        model="m",
        revision="r",
        source_instance=f"source-{number}",
        source_node="n1",
        instance_id=f"destination-{number}",
        node="n2",
        created=float(number),
    )


@dataclass
class Bucket:
    """Records by key, each with its revision."""

    entries: dict[str, tuple[MigrationRecord, int]] = field(default_factory=dict)

    def put(self, record: MigrationRecord) -> int:
        revision = self.entries[record.migration_id][1] + 1 if record.migration_id in self.entries else 1
        self.entries[record.migration_id] = (record, revision)
        return revision

    async def update(self, key: str, value: bytes, *, last: int) -> int:
        if self.entries[key][1] != last:
            raise KeyWrongLastSequenceError
        return self.put(MigrationRecord.model_validate_json(value))

    async def get(self, key: str) -> SimpleNamespace:
        record, revision = self.entries[key]
        return SimpleNamespace(value=record.model_dump_json().encode(), revision=revision)


@dataclass
class FakeRecords:
    bucket: Bucket
    owner: str = ME

    async def claim(self, seen: MigrationRecord, lost: Callable[[bool], None]) -> tuple[MigrationRecord, Held]:
        mine = seen.model_copy(update={"owner": ME, "beats": seen.beats + 1})
        return mine, Held(cast(KeyValue, self.bucket), mine, self.bucket.put(mine), lost, 1_000_000)


@dataclass
class EmptyEngines:
    """Engines without requests.

    Attributes:
        asked: Called before each reply.
    """

    asked: Callable[[Ask], None]

    async def ask(self, ask: Ask) -> Message:
        self.asked(ask)
        return RequestsListed()

    async def forget(self, forget: Forget) -> None: ...


async def test_migration_lost_at_its_last_write_does_not_stop_the_migrator() -> None:
    """Another owner had it since: this process was paused for longer than the lease."""
    bucket = Bucket()
    orders = [order(1), order(2)]
    taken, done = asyncio.Event(), asyncio.Event()

    def take_first(ask: Ask) -> None:
        if ask.address == "source-1":
            bucket.put(bucket.entries["m-1"][0].model_copy(update={"owner": "another"}))
            taken.set()

    class WatchedMetrics(Metrics):
        def record(self, record: MigrationRecord) -> None:
            ended.append(record.migration_id)
            done.set()

    ended: list[str] = []
    for each in orders:
        bucket.put(each)
    records = cast(Records, cast(Any, FakeRecords(bucket)))
    migrator = Migrator(records, EmptyEngines(take_first), WatchedMetrics(), Options())
    for each in orders:
        migrator.copy.put(each.migration_id, each.model_dump_json().encode())
    running = asyncio.create_task(migrator.run())
    try:
        async with asyncio.timeout(60):
            # The watch of the bucket is late: it shows the other owner only now.
            await taken.wait()
            migrator._leases.record_seen(bucket.entries["m-1"][0], 1e12)
            await done.wait()
    finally:
        await end(running)
    assert ended == ["m-2"]
    assert bucket.entries["m-1"][0].owner == "another"


async def test_read_of_the_bucket_that_is_older_than_the_claim_does_not_end_the_migration() -> None:
    """A reconnection reads the whole bucket: its records may be applied after the next claim."""
    bucket, unclaimed, done = Bucket(), order(1), asyncio.Event()
    bucket.put(unclaimed)

    def apply_late_read(ask: Ask) -> None:
        migrator.copy.replace({unclaimed.migration_id: unclaimed.model_dump_json().encode()})

    class WatchedMetrics(Metrics):
        def record(self, record: MigrationRecord) -> None:
            done.set()

    records = cast(Records, cast(Any, FakeRecords(bucket)))
    migrator = Migrator(records, EmptyEngines(apply_late_read), WatchedMetrics(), Options())
    migrator.copy.put(unclaimed.migration_id, unclaimed.model_dump_json().encode())
    running = asyncio.create_task(migrator.run())
    try:
        async with asyncio.timeout(60):
            await done.wait()
    finally:
        await end(running)
    record, _ = bucket.entries[unclaimed.migration_id]
    assert (record.owner, record.over) == (ME, True)


async def test_migration_whose_decision_fails_ends_and_the_next_one_is_done() -> None:
    """Otherwise it would end one migrator after the other, as often as they are restarted."""
    bucket, orders, done = Bucket(), [order(1), order(2)], asyncio.Event()

    class FaultyEngines(EmptyEngines):
        async def ask(self, ask: Ask) -> Message:
            return RequestsListed.model_construct(requests=cast(Any, (None,))) if ask.address == "source-1" else RequestsListed()

    class WatchedMetrics(Metrics):
        def record(self, record: MigrationRecord) -> None:
            if record.migration_id == "m-2":
                done.set()

    for each in orders:
        bucket.put(each)
    records = cast(Records, cast(Any, FakeRecords(bucket)))
    migrator = Migrator(records, FaultyEngines(lambda _: None), WatchedMetrics(), Options())
    for each in orders:
        migrator.copy.put(each.migration_id, each.model_dump_json().encode())
    running = asyncio.create_task(migrator.run())
    try:
        async with asyncio.timeout(60):
            await done.wait()
    finally:
        await end(running)
    failed, _ = bucket.entries["m-1"]
    assert failed.state == "failed"
    assert failed.error is not None
    assert failed.error.code == "migration_failed"
    assert "AttributeError" in failed.error.message
    assert bucket.entries["m-2"][0].over


async def test_write_after_the_lease_was_lost_is_not_waited_for() -> None:
    """A migration may end before its loop has read that another migrator owns it."""
    bucket, lost = Bucket(), list[bool]()
    mine = order(1).model_copy(update={"owner": ME})
    held = Held(cast(KeyValue, bucket), mine, bucket.put(mine), lost.append, 1_000_000)
    bucket.put(mine.model_copy(update={"owner": "another"}))
    held.save(mine.model_copy(update={"beats": 1}))
    async with asyncio.timeout(60):
        await held.run()
    assert lost == [False]
    held.save(mine.model_copy(update={"state": "done"}))
    async with asyncio.timeout(10):
        assert not await held.wait_until_written()
