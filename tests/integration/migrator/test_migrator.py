"""Migrators that work, die, stop, lose NATS, and are cancelled."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Callable

from shared.contracts.migration import LEASE_S
from shared.messaging.streams import migrations_bucket
from tests.integration.migrator.conftest import Site
from tests.support.servers import NatsServer


async def test_an_instance_is_emptied(site: Site, new_port: Callable[[], int]) -> None:
    port = new_port()
    source = await site.engine("a", "q-1", "p-1", "o-1")
    destination = await site.engine("b")
    site.migrator(migrator_metrics_port=port)
    record = await site.over(await site.order())
    assert record.state == "done"
    assert {m.outcome for m in record.requests} == {"moved"}
    assert source.requests == {}
    assert set(destination.requests) == {"q-2", "p-2", "o-2"}
    assert destination.prepared == {}
    assert record.traceparent is not None
    assert record.duration_ms is not None

    def scrape() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text: str = answer.read().decode()
            return text

    async def counted() -> bool:
        return "thaw_migration_pause_seconds_count" in await asyncio.to_thread(scrape)

    await site.until(counted)
    text = await asyncio.to_thread(scrape)
    assert 'thaw_migration_requests_total{gen_ai_request_model="m",thaw_outcome="moved",thaw_reason="operator"} 3.0' in text
    assert "thaw_migration_rounds_total" in text
    assert "thaw_migration_tokens_total" in text


async def test_another_revision_is_refused(site: Site) -> None:
    source = await site.engine("a", "q-1")
    (await site.engine("b")).revision = "another"
    site.migrator()
    record = await site.over(await site.order())
    assert record.state == "failed"
    assert "another revision" in record.requests[0].reason
    assert set(source.requests) == {"q-1"}


async def test_second_migrator_finishes_after_the_first_is_killed(site: Site) -> None:
    source = await site.engine("a", "q-1", "p-1")
    destination = await site.engine("b")
    destination.hold = asyncio.Event()
    first = await site.process("first")
    key = await site.order()
    await destination.preparing.wait()
    assert (await site.owned(key)).startswith("first")
    second = await site.process("second")
    first.kill()
    await first.wait()
    died = time.monotonic()
    destination.hold.set()
    record = await site.over(key)
    assert time.monotonic() - died >= LEASE_S - 1.5, "it had renewed its lease a second before at most"
    assert record.owner.startswith("second")
    assert record.state == "done"
    assert source.requests == {}
    assert sorted(m.request_id for m in site.moves) == ["p-1", "q-1"], "each moved once"
    assert destination.prepared == {}
    assert second.returncode is None


async def test_stopped_migrator_hands_over_immediately(site: Site) -> None:
    await site.engine("a", "q-1")
    destination = await site.engine("b")
    destination.hold = asyncio.Event()
    site.migrator(migrator_name="first")
    key = await site.order()
    await destination.preparing.wait()
    stop, task = site.migrators[0]
    stop.set()
    assert await task == 0
    assert (await site.record(key)).owner == ""
    destination.hold = None
    site.migrator(migrator_name="second")
    assert (await site.over(key)).state == "done"


async def test_migration_survives_two_seconds_without_nats(site: Site, own_nats: NatsServer) -> None:
    source = await site.engine("a", "q-1")
    destination = await site.engine("b")
    destination.hold = asyncio.Event()
    site.migrator()
    site.migrator()
    key = await site.order()
    await destination.preparing.wait()
    await asyncio.to_thread(own_nats.kill)
    destination.hold.set()
    await asyncio.sleep(2.0)  # the condition under test
    await asyncio.to_thread(own_nats.restart)
    record = await site.over(key, 30)
    assert record.state == "done", record
    assert source.requests == {}
    assert len(destination.requests) == 1
    assert len(site.moves) == 1


async def test_a_migration_is_called_off(site: Site) -> None:
    source = await site.engine("a", "q-1")
    destination = await site.engine("b")
    destination.hold = asyncio.Event()
    site.migrator()
    key = await site.order()
    await destination.preparing.wait()
    bucket = await migrations_bucket(site.mesh.nc.jetstream())
    cancelled = (await site.record(key)).model_copy(update={"state": "cancelled"})
    await bucket.put(key, cancelled.model_dump_json().encode())

    async def forgotten() -> bool:
        return destination.forgotten == [f"{key}.q-1"]

    await site.until(forgotten)
    assert (await site.record(key)).state == "cancelled"
    assert set(source.requests) == {"q-1"}


async def test_death_of_the_destination_fails_the_migration(site: Site) -> None:
    source = await site.engine("a", "q-1")
    destination = await site.engine("b")
    destination.hold = asyncio.Event()
    site.migrator()
    key = await site.order()
    await destination.preparing.wait()
    await destination.die()
    record = await site.over(key, 30)
    assert record.state == "failed"
    assert set(source.requests) == {"q-1"}


async def test_two_migrators_carry_out_two_migrations(site: Site) -> None:
    await site.engine("a", "q-1")
    await site.engine("c", "p-1")
    destination = await site.engine("b")
    destination.hold = asyncio.Event()
    site.migrator(migrator_name="first")
    site.migrator(migrator_name="second")
    keys = [await site.order(1), await site.order(2, source="c")]
    owners = [await site.owned(key) for key in keys]
    assert owners[0] != owners[1]
    destination.hold.set()
    assert [(await site.over(key)).state for key in keys] == ["done", "done"]
