"""Decisions beside views of the ledger that take long."""

from __future__ import annotations

import asyncio

import asyncpg

from services.scheduler.adapters.database import connect, migrate, plain_url
from services.scheduler.adapters.ledger import VIEWS_AT_ONCE, Ledger
from shared.contracts import subjects
from shared.contracts.usage import UsageViewed, ViewUsage
from tests.integration.scheduler.conftest import Site, spec

VIEWS = 12
_WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'usage'::regclass"


async def until_waiting(connection: asyncpg.Connection, count: int) -> None:
    """Wait until so many statements wait for a lock."""
    async with asyncio.timeout(60):
        while True:
            if await connection.fetchval(_WAITING) >= count:
                return
            await asyncio.sleep(0.01)


async def test_decisions_do_not_wait_for_views_of_usage(site: Site) -> None:
    await site.node()
    site.scheduler()
    await site.add(spec("a"))
    connection = await asyncpg.connect(plain_url(site.settings.database_url.get_secret_value()))
    try:
        async with connection.transaction():
            await connection.execute("LOCK TABLE usage IN ACCESS EXCLUSIVE MODE")
            view = ViewUsage(since=0, deadline_ms=120_000)
            views = [asyncio.create_task(site.mesh.request(subjects.ADMIN, view, UsageViewed)) for _ in range(VIEWS)]
            await until_waiting(connection, VIEWS_AT_ONCE)
            demand = asyncio.create_task(site.demand("a", 1))
            await asyncio.wait((demand, *views), return_when=asyncio.FIRST_COMPLETED)
            assert demand.done(), "a view was answered first"
            assert (await demand).plan_id is not None
        await asyncio.gather(*views, return_exceptions=True)
    finally:
        await connection.close()


async def test_views_leave_a_connection_to_the_ledgers_records(migrated_url: str) -> None:
    engine = connect(migrated_url)
    connection = await asyncpg.connect(plain_url(migrated_url))
    try:
        await migrate(engine)
        ledger = Ledger(engine)
        async with connection.transaction():
            await connection.execute("LOCK TABLE usage IN ACCESS EXCLUSIVE MODE")
            views = [asyncio.create_task(ledger.view(ViewUsage(since=0))) for _ in range(VIEWS)]
            await until_waiting(connection, VIEWS_AT_ONCE)
            reading = asyncio.create_task(ledger.read_held_clocks())
            await asyncio.wait((reading, *views), return_when=asyncio.FIRST_COMPLETED)
            assert reading.done(), "a view ended first"
        assert all(isinstance(found, UsageViewed) for found in await asyncio.gather(*views))
    finally:
        await connection.close()
        await engine.dispose()
