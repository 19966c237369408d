"""Leader changes: nothing is lost and nothing is decided twice."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.event import listen

from services.scheduler.adapters import repository as repository_module
from services.scheduler.adapters.database import connect, migrate
from services.scheduler.adapters.repository import Repository, StaleEpoch
from services.scheduler.app import run
from services.scheduler.domain.cost.learned import Parameter
from services.scheduler.domain.estimates.start_times import name_of_key
from services.scheduler.domain.state.changes import Drop, Put
from services.scheduler.domain.state.entities import Model
from services.scheduler.domain.state.measurements import ANYWHERE, Estimate, estimate_key
from shared.contracts.admin import ClusterView, ModelAwake, ViewCluster, WakeModel
from shared.contracts.node import InstanceState
from shared.contracts.traces import TRACE_MAX_AGE_S, TRACE_MAX_COUNT
from shared.errors import DeadlineExceeded, StaleToken, ThawError, Unavailable
from shared.tasks import end
from tests.integration.scheduler.conftest import Site, process, spec, standby
from tests.integration.scheduler.queries import catalogue, ready
from tests.support.fake_node import FakeNode
from tests.support.servers import NatsServer, PostgresServer

log = logging.getLogger(__name__)


LOST_MS = 500
"""After this long a message to a killed leader is sent again."""


async def leader(site: Site) -> str:
    view: ClusterView = await site.ask(ViewCluster(deadline_ms=LOST_MS), ClusterView)
    return view.scheduler


@asynccontextmanager
async def demanded(site: Site, model: str) -> AsyncIterator[None]:
    """Report demand as a gateway does: again and again, and with the next message if one is lost.

    A leader cancels a start that no gateway asks for.
    """

    async def report() -> None:
        while True:
            with contextlib.suppress(ThawError):
                await site.demand(model, 1, deadline_ms=LOST_MS)
            await asyncio.sleep(0.1)

    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        await end(reporting)


async def test_a_killed_leader_is_replaced(site: Site) -> None:
    node = await site.node()
    first = await process(site, "first")
    try:
        await site.add(spec("a"), spec("b"))
        await site.ask(WakeModel(name="a"), ModelAwake)
        second = await process(site, "second")
        try:
            await standby(site)
            node.hold_starts = asyncio.Event()
            await site.demand("b", 1)
            await site.until(lambda: bool(node.of("b")))
            async with demanded(site, "b"):
                killed = time.monotonic()
                first.send_signal(signal.SIGKILL)
                await first.wait()
                while await leader(site) != "second":
                    pass
                took = time.monotonic() - killed
                log.info("takeover after kill -9: %.3f s", took)
                assert took < 30
                node.hold_starts.set()
                await site.until(lambda: ready(node, "b"))
            assert (await site.demand("a", 1)).outlook == "ready"
            assert len(node.started("a")) == len(node.started("b")) == 1
        finally:
            second.terminate()
            assert await second.wait() == 0
    finally:
        if first.returncode is None:
            first.kill()
            await first.wait()


async def test_new_leader_recovers_from_the_database_alone(site: Site) -> None:
    node = await site.node()
    stop = asyncio.Event()
    first = asyncio.create_task(run(site.settings, stop))
    await site.add(spec("a", replicas={"min": 1, "max": 1}), spec("b"))
    await site.until(lambda: ready(node, "a"))
    epoch = (await site.view()).epoch
    stop.set()
    assert await first == 0
    with pytest.raises(Unavailable):
        await site.demand("a", 1)
    site.scheduler()
    view = await site.view()
    assert view.epoch == epoch + 1
    assert [m.card.name for m in view.models] == ["a", "b"]
    await site.ask(WakeModel(name="b"), ModelAwake)
    assert len(node.starts("a")) == len(node.starts("b")) == 1


async def test_leader_with_an_empty_database_exceeds_the_epochs_in_use(site: Site, postgres_server: PostgresServer) -> None:
    node = await site.node()
    stop = asyncio.Event()
    first = asyncio.create_task(run(site.settings, stop))
    await site.add(spec("a"))
    await site.ask(WakeModel(name="a"), ModelAwake)
    stop.set()
    await first
    fresh = postgres_server.create_database(f"fresh_{node.boot_id}")
    # Epochs restart there, and the instance has a token of epoch 1: let the node see more epochs.
    instance = next(iter(node.instances.values()))
    instance.command = instance.command.model_copy(update={"token": 7 * 2**32 + 1})
    site.scheduler(database_url=SecretStr(fresh))

    async def above() -> bool:
        return (await site.view()).epoch > 7

    await site.until(above)

    async def nothing_there() -> bool:
        return await catalogue(site) == {}

    await site.until(nothing_there)  # the catalogue follows the database
    await site.until(lambda: instance.state is InstanceState.STOPPED)


async def test_deposed_leader_cannot_write(database_url: str) -> None:
    engine = connect(database_url)
    try:
        await migrate(engine)
        await migrate(engine)
        repository = Repository(engine)
        with pytest.raises(StaleEpoch):
            await repository.commit(41, [Drop(Model, "a")])
    finally:
        await engine.dispose()


async def test_old_plans_are_pruned_by_age_and_count_except_pending_ones(migrated_url: str) -> None:
    engine = connect(migrated_url)
    now = time.time()
    plans = text(
        "INSERT INTO plans (plan_id, model, created, trigger, way, reason, outcome, candidates, predicted, measured) "
        "SELECT CAST(:tag AS text) || n, 'm', CAST(:now AS float) - CAST(:age AS float) - n, "
        "'demand', 'load', '', CASE n WHEN 0 THEN 'pending' ELSE 'ready' END, '[]', '{}', '[]' "
        "FROM generate_series(0, CAST(:last AS int)) n"
    )

    async def kept() -> list[str]:
        async with engine.connect() as connection:
            return list((await connection.execute(text("SELECT plan_id FROM plans ORDER BY created DESC, plan_id DESC"))).scalars())

    try:
        await migrate(engine)
        async with engine.begin() as connection:
            await connection.execute(text("UPDATE leadership SET epoch = 7"))
            await connection.execute(plans, {"tag": "old", "now": now, "age": TRACE_MAX_AGE_S + 60, "last": 5})
            await connection.execute(plans, {"tag": "new", "now": now, "age": 0, "last": 99})
        repository = Repository(engine)
        with pytest.raises(StaleEpoch):
            await repository.prune(6, now)
        assert await repository.prune(7, now) == 5
        assert await kept() == [*(f"new{n}" for n in range(100)), "old0"]
        async with engine.begin() as connection:
            await connection.execute(plans, {"tag": "newer", "now": now + 20_000, "age": 0, "last": TRACE_MAX_COUNT - 1})
        assert await repository.prune(7, now) == 99, "of 101 too many two are pending"
        assert (await kept())[TRACE_MAX_COUNT:] == ["new0", "old0"]
    finally:
        await engine.dispose()


async def test_every_growing_table_is_pruned_in_bounded_batches(migrated_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table that grows is pruned in bounded batches.

    Rows of removed models and nodes, and more plans than fit one batch, are deleted; no transaction
    is large.
    """
    engine = connect(migrated_url)
    monkeypatch.setattr(repository_module, "PRUNE_BATCH", 40)
    monkeypatch.setattr(repository_module, "TRACE_MAX_COUNT", 10)
    many = "FROM generate_series(1, 300) n"
    rows = (
        "INSERT INTO plans (plan_id, model, created, trigger, way, reason, outcome, candidates, predicted, measured) "
        f"SELECT 'p' || n, 'm', n, 'demand', 'load', '', 'ready', '[]', '{{}}', '[]' {many}",
        f"INSERT INTO parameters (model, node, quantity, value, error, count) SELECT 'm' || n, '', 'init', 1, 1, 1 {many}",
        f"INSERT INTO parameters (model, node, quantity, value, error, count) SELECT '', 'n' || n, 'init', 1, 1, 1 {many}",
        f"INSERT INTO profiles (model, generation, engine, by_kind) SELECT 'm' || n, 1, 'builtin', '{{}}' {many}",
        f"INSERT INTO devices (node, device_id, kind, name, budget_bytes) SELECT 'n' || n, 'cpu:0', 'cpu', '', 1 {many}",
        f"INSERT INTO residency (node, weights_id, tier, nbytes, heard_at) SELECT 'n' || n, 'w', 'ssd', 1, 1 {many}",
        f"INSERT INTO links (node, link, queued_bytes, loads, heard_at) SELECT 'n' || n, 'l', 1, 1, 1 {many}",
    )
    growing = ("plans", "parameters", "profiles", "devices", "residency", "links")
    deleted: list[int] = []

    def note(_c: object, cursor: Any, statement: str, *_: object) -> None:
        if statement.startswith("DELETE FROM plans"):
            deleted.append(cursor.rowcount)

    try:
        await migrate(engine)
        async with engine.begin() as connection:
            await connection.execute(text("UPDATE leadership SET epoch = 7"))
            for statement in rows:
                await connection.execute(text(statement))
        listen(engine.sync_engine, "after_cursor_execute", note)
        assert await Repository(engine).prune(7, 300.0) == 290
        assert deleted == [40] * 7 + [10]
        async with engine.begin() as connection:
            left = {t: (await connection.execute(text(f"SELECT count(*) FROM {t}"))).scalar() for t in growing}
        assert left == {**dict.fromkeys(growing, 0), "plans": 10}
    finally:
        await engine.dispose()


async def test_estimates_of_template_keys_are_kept_for_the_next_leader(migrated_url: str) -> None:
    engine = connect(migrated_url)
    names = (name_of_key("k"), "a model that is not registered")
    learned = [Put(Estimate(name, ANYWHERE, {"init": Parameter(9.0, 1.0, 1)})) for name in names]

    async def list_kept() -> set[str]:
        repository = Repository(engine)
        await repository.prune(7, time.time())
        return set((await repository.load(7, time.time())).estimates)

    try:
        await migrate(engine)
        async with engine.begin() as connection:
            await connection.execute(text("UPDATE leadership SET epoch = 7"))
        await Repository(engine).commit(7, learned)
        assert await list_kept() == {estimate_key(name_of_key("k"), ANYWHERE)}
        async with engine.begin() as connection:
            await connection.execute(text("UPDATE parameters SET updated = updated - 31 * 86400"))
        assert await list_kept() == set(), "no such model has started for a month"
    finally:
        await engine.dispose()


async def test_commands_of_an_older_epoch_are_refused(site: Site) -> None:
    node = await site.node()
    node.highest_token = 3 * 2**32
    site.scheduler()
    await site.add(spec("a"))
    with pytest.raises((StaleToken, Unavailable)):
        await site.mesh.request("thaw.v1.scheduler.admin", WakeModel(name="a"), ModelAwake)

    async def led_past() -> bool:
        return (await site.view()).epoch >= 3

    # Each refusal costs an epoch, until the tokens exceed those the node has seen.
    async def woken() -> bool:
        try:
            await site.mesh.request("thaw.v1.scheduler.admin", WakeModel(name="a"), ModelAwake)
        except (StaleToken, Unavailable):
            return False
        return True

    await site.until(woken)
    assert await led_past()


async def test_postgres_restart_loses_no_demand(own_nats: NatsServer, site: Site) -> None:
    server = PostgresServer()
    try:
        node = await site.node()
        site.scheduler(database_url=SecretStr(server.url))
        await site.add(spec("a"))
        epoch = (await site.view()).epoch
        await asyncio.to_thread(server.restart)

        async def led_again() -> bool:
            return (await site.view()).epoch > epoch

        await site.until(led_again)
        await site.demand("a", 1)
        await site.until(lambda: ready(node, "a"))
    finally:
        await site.close()
        await asyncio.to_thread(server.close)


async def test_nats_restarts_under_a_leader(own_nats: NatsServer, site: Site) -> None:
    node: FakeNode = await site.node()
    site.scheduler()
    await site.add(spec("a"))
    await asyncio.to_thread(own_nats.restart)

    async def asked() -> bool:
        try:
            await site.demand("a", 1, deadline_ms=LOST_MS)
        except (DeadlineExceeded, Unavailable):
            return False
        return ready(node, "a")

    await site.until(asked)


async def test_routes_are_those_that_the_engine_declares_now(site: Site, migrated_url: str) -> None:
    """The engine's current declaration determines routes, not the database."""
    await site.node()
    site.scheduler()
    await site.add(spec("a"))
    stop, task = site.schedulers[0]
    stop.set()
    await task
    engine = connect(migrated_url)
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE models SET card = jsonb_set(card, '{routes}', '[\"/v1/of_yesterday\"]')"))
    await engine.dispose()
    site.scheduler()
    await site.view()
    assert (await catalogue(site))["a"].routes == ()
