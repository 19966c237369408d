"""Migration orders across a leader change; the test acts as the migrator."""

from __future__ import annotations

import asyncio

import pytest

from services.scheduler.domain.migration import orders as migrating
from shared.contracts import subjects
from shared.contracts.admin import ChangeNode, Migrate, MigrationsViewed, ViewMigrations
from shared.contracts.base import Done
from shared.contracts.migration import MigrationRecord, MovedRequest
from shared.contracts.node import InstanceState, StopInstance
from shared.errors import NotFound, Unavailable
from shared.messaging.streams import migrations_bucket
from tests.integration.scheduler.conftest import Site, spec
from tests.support.fake_node import MIB, FakeNode


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep orders that the test, as the migrator, claims late."""
    monkeypatch.setattr(migrating, "UNCLAIMED_S", 600.0)


async def serving(site: Site, node: FakeNode) -> str:
    """Start an instance on `node` that serves two requests."""
    await site.add(spec("one", keep_alive=-1))
    await site.demand("one", 1)
    await site.until(lambda: any(i.state is InstanceState.READY for i in node.of("one")))
    await site.demand("one", 0)
    await node.load("one", 2)
    return node.of("one")[0].command.instance_id


async def another(site: Site) -> FakeNode:
    """Add a second node and wait until it has reported."""
    node = await site.node(node="n2", budget=400 * MIB)

    async def reported() -> bool:
        return any(n.node == "n2" and n.alive for n in (await site.view()).nodes)

    await site.until(reported)
    return node


async def ordered(site: Site) -> list[MigrationRecord]:
    bucket = await migrations_bucket(site.mesh.nc.jetstream())
    status = await bucket.status()
    if not status.values:
        return []
    # Not `bucket.keys()`: that misses an entry that is written at that moment.
    info = await site.mesh.nc.jetstream().stream_info(f"KV_{subjects.MIGRATIONS_BUCKET}", subjects_filter=">")
    entries = [await bucket.get(subject.split(".")[-1]) for subject in info.state.subjects or {}]
    return [MigrationRecord.model_validate_json(e.value or b"") for e in entries]


async def an_order(site: Site) -> MigrationRecord:
    async def there() -> bool:
        return bool(await ordered(site))

    await site.until(there)
    (record,) = await ordered(site)
    return record


async def finish(site: Site, record: MigrationRecord, state: str = "done") -> None:
    bucket = await migrations_bucket(site.mesh.nc.jetstream())
    moved = (MovedRequest(request_id="q-1", outcome="moved", tokens=9, pause_ms=20.0),)
    over = record.model_copy(update={"state": state, "owner": "test", "requests": moved})
    await bucket.put(record.migration_id, over.model_dump_json().encode())


@pytest.mark.usefixtures("patient")
async def test_migrate_command_is_answered_when_the_migration_is_done(site: Site) -> None:
    first = await site.node(node="n1", budget=400 * MIB)
    site.scheduler()
    source = await serving(site, first)
    second = await another(site)
    asking = asyncio.create_task(site.ask(Migrate(instance_id=source, node="n2", deadline_ms=60_000), MigrationsViewed))
    record = await an_order(site)
    assert (record.source_instance, record.node, record.reason) == (source, "n2", "operator")
    assert record.instance_id == second.of("one")[0].command.instance_id
    await finish(site, record)
    (answered,) = (await asking).migrations
    assert answered.state == "done"
    await site.until(lambda: any(isinstance(c, StopInstance) and c.instance_id == source for c in first.commands))
    viewed = await site.ask(ViewMigrations(), MigrationsViewed)
    assert [m.migration_id for m in viewed.migrations] == [record.migration_id]


async def test_a_request_without_an_instance(site: Site) -> None:
    await site.node()
    site.scheduler()
    await site.view()
    with pytest.raises(NotFound, match="may be over"):
        await site.mesh.request(subjects.ADMIN, Migrate(request_id="req_none", deadline_ms=60_000), MigrationsViewed)


@pytest.mark.usefixtures("patient")
async def test_ordered_migration_continues_under_the_next_leader(site: Site) -> None:
    first = await site.node(node="n1", budget=400 * MIB)
    site.scheduler(scheduler_name="first")
    source = await serving(site, first)
    await another(site)
    asked = Migrate(instance_id=source, node="n2", deadline_ms=60_000)
    asking = asyncio.create_task(site.mesh.request(subjects.ADMIN, asked, MigrationsViewed))
    record = await an_order(site)
    stop, task = site.schedulers[0]
    stop.set()
    await task
    with pytest.raises(Unavailable, match="no longer the leader"):
        await asking
    site.scheduler(scheduler_name="second")
    await site.until(lambda: _leads(site, "second"))
    await finish(site, record)
    await site.until(lambda: any(isinstance(c, StopInstance) and c.instance_id == source for c in first.commands))


@pytest.mark.usefixtures("patient")
async def test_migration_that_ended_without_a_leader_is_applied_later(site: Site) -> None:
    first = await site.node(node="n1", budget=400 * MIB)
    site.scheduler()
    source = await serving(site, first)
    await another(site)
    (ordered_now,) = (
        await site.ask(Migrate(instance_id=source, node="n2", wait=False, deadline_ms=60_000), MigrationsViewed)
    ).migrations
    record = await an_order(site)
    assert record == ordered_now
    stop, task = site.schedulers[0]
    stop.set()
    await task
    await finish(site, record)
    site.scheduler(scheduler_name="second")
    await site.until(lambda: any(isinstance(c, StopInstance) and c.instance_id == source for c in first.commands))


async def test_migration_without_a_migrator_is_cancelled(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrating, "UNCLAIMED_S", 0.2)
    first = await site.node(node="n1", budget=400 * MIB)
    site.scheduler()
    source = await serving(site, first)
    await another(site)
    (record,) = (await site.ask(Migrate(instance_id=source, node="n2", deadline_ms=60_000), MigrationsViewed)).migrations
    assert record.state == "cancelled"
    assert record.error is not None
    assert "no migrator" in record.error.message
    assert (await an_order(site)).state == "cancelled"


async def test_next_leader_continues_a_drain(site: Site) -> None:
    first = await site.node(node="n1", budget=400 * MIB)
    site.scheduler()
    source = await serving(site, first)
    await site.ask(ChangeNode(node="n1", action="drain"), Done)
    stop, task = site.schedulers[0]
    stop.set()
    await task
    site.scheduler(scheduler_name="second")
    second = await another(site)
    await first.load("one", 2)
    record = await an_order(site)
    assert (record.source_instance, record.reason) == (source, "drain")
    assert record.instance_id == second.of("one")[0].command.instance_id
    await site.until(lambda: any(isinstance(c, StopInstance) and c.instance_id == source for c in first.commands))


async def _leads(site: Site, name: str) -> bool:
    return (await site.view()).scheduler == name
