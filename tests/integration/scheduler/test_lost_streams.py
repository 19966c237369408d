"""JetStream loses its streams during a term: they are created and filled again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from nats.js.errors import NotFoundError

from services.scheduler import app
from services.scheduler.adapters.catalog import Catalog
from shared.contracts import subjects
from shared.contracts.admin import ModelAwake, RemoveModel, WakeModel
from shared.contracts.base import Done
from shared.contracts.traces import LoadTrace
from shared.messaging.streams import catalog_bucket
from tests.integration.scheduler.conftest import Site, spec
from tests.integration.scheduler.queries import catalogue, plan_of
from tests.support.servers import NatsServer

CATALOG_STREAM = f"KV_{subjects.CATALOG_BUCKET}"


@pytest.fixture
async def led(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Register a model; the leader checks the catalogue only when it writes or has reconnected."""
    monkeypatch.setattr(app, "CATALOG_CHECK_S", 3600.0)
    await site.node()
    site.scheduler()
    await site.add(spec("a"))
    return site


async def test_the_next_registration_writes_a_lost_catalogue_again(led: Site) -> None:
    await led.mesh.nc.jetstream().delete_stream(CATALOG_STREAM)
    await led.add(spec("b"))
    assert set(await catalogue(led)) == {"a", "b"}


async def restart(led: Site, own_nats: NatsServer, change: Callable[[Path], object]) -> None:
    """Restart NATS after a change of its storage, and wait until the leader answers again."""
    reconnected = asyncio.Event()
    with led.mesh.on_reconnect(reconnected.set):
        own_nats.kill()
        change(own_nats.directory / "js")
        own_nats.restart()
        await reconnected.wait()
    await led.view()


async def await_catalogue(led: Site, names: set[str]) -> None:
    async def is_written() -> bool:
        return set(await catalogue(led)) == names

    await led.until(is_written)


async def test_the_catalogue_is_written_again_after_nats_restarted_without_its_storage(led: Site, own_nats: NatsServer) -> None:
    await restart(led, own_nats, shutil.rmtree)
    await await_catalogue(led, {"a"})


async def test_a_model_that_an_earlier_state_of_the_storage_has_is_removed_again(
    led: Site, own_nats: NatsServer, tmp_path: Path
) -> None:
    earlier = tmp_path / "js"

    def restore(storage: Path) -> None:
        shutil.rmtree(storage)
        shutil.copytree(earlier, storage)

    await restart(led, own_nats, lambda storage: shutil.copytree(storage, earlier))
    await led.ask(RemoveModel(name="a"), Done)
    await await_catalogue(led, set())
    await restart(led, own_nats, restore)
    await await_catalogue(led, set())


@pytest.mark.parametrize("emptied", ["created again", "purged"])
async def test_entries_that_were_lost_are_written_again(site: Site, monkeypatch: pytest.MonkeyPatch, emptied: str) -> None:
    """A gateway may create the bucket first; a cluster may restore it without entries."""
    monkeypatch.setattr(app, "CATALOG_CHECK_S", 0.1)
    await site.node()
    site.scheduler()
    await site.add(spec("a"), spec("b"))
    js = site.mesh.nc.jetstream()
    if emptied == "purged":
        await js.purge_stream(CATALOG_STREAM)
    else:
        await js.delete_stream(CATALOG_STREAM)
        await catalog_bucket(js)

    async def is_written() -> bool:
        return set(await catalogue(site)) == {"a", "b"}

    await site.until(is_written)


async def test_checks_do_not_repeat_a_refused_change_of_the_buckets_configuration(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    js = site.mesh.nc.jetstream()
    await catalog_bucket(js)
    catalog = Catalog(js, replicas=3)  # more than there are servers
    await catalog.reconcile(())
    for _ in range(2):
        await catalog.check()
    assert [r.getMessage() for r in caplog.records] == ["a stream keeps its configuration"]


async def test_traces_of_loads_are_stored_after_their_stream_was_lost(led: Site) -> None:
    js = led.mesh.nc.jetstream()
    await js.delete_stream(subjects.TRACE_STREAM)
    await led.ask(WakeModel(name="a"), ModelAwake)
    plan = await plan_of(led, "a")

    async def is_stored() -> bool:
        try:
            found = await js.get_last_msg(subjects.TRACE_STREAM, subjects.load_trace(plan.plan_id))
        except NotFoundError:
            return False
        return LoadTrace.model_validate_json(found.data or b"").plan_id == plan.plan_id

    await led.until(is_stored)
