"""A scheduler crash between any two steps.

The next leader recovers, without double booking.
"""

from __future__ import annotations

from collections import Counter

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from services.scheduler.adapters import tables
from services.scheduler.adapters.database import connect, migrate
from services.scheduler.adapters.repository import Repository, StaleEpoch
from services.scheduler.domain.state.changes import Drop
from services.scheduler.domain.state.entities import Model
from shared.contracts.node import InstanceState
from shared.errors import StaleToken
from tests.integration.scheduler.crashing import FIRST, THEN, Crashed, Site, counted, lead, new_site

ROUNDS = 16
"""Rounds of half a second: a lost order is detected after three."""


async def run_through(site: Site) -> None:
    """Run until a term ends."""
    async with counted(site.engine, site.steps):
        for _ in range(3):
            try:
                last = await lead(site, rounds=ROUNDS)
            except Crashed:
                site.now += 0.2
            else:
                plans = (last.loop.state.plans.get(i.plan_id) for i in last.loop.state.instances.values())
                assert all(p is None or p.outcome != "pending" for p in plans), "every plan has an outcome"
                return
    raise AssertionError("a leader that does not crash leads to the end")


def outcome(site: Site) -> Counter[str]:
    return Counter(m for m in (*FIRST, *THEN) for _ in site.of(m, InstanceState.READY))


async def check(site: Site) -> None:
    """Check that nodes, database and replies agree.

    At every start the nodes themselves check that they are not overbooked.
    """
    async with site.engine.connect() as connection:
        rows = (await connection.execute(select(tables.instances.c.instance_id, tables.instances.c.state))).all()
        plans = {p for (p,) in await connection.execute(select(tables.plans.c.plan_id))}
    there = {i for m in (*FIRST, *THEN) for i in site.of(m)}
    assert {instance_id for instance_id, _ in rows} == there, "the database knows what runs, and nothing else"
    assert site.promised <= plans, "no acknowledged decision is lost"
    assert all(len(site.of(m)) <= 1 for m in (*FIRST, *THEN)), "none is started twice"
    assert site.epochs == sorted(set(site.epochs))
    with pytest.raises(StaleEpoch):
        await Repository(site.engine).commit(site.epochs[-1] - 1, [Drop(Model, "a")])


@pytest.fixture
async def engine(migrated_url: str) -> AsyncEngine:
    engine = connect(migrated_url)
    await migrate(engine)
    return engine


# Some fifty sites, one after another, that wait for Postgres at each step: slow on a busy machine.
@pytest.mark.timeout(600)
async def test_scheduler_recovers_from_a_crash_at_any_step(
    migrated_url: str, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        whole = await new_site(migrated_url, engine, monkeypatch, 0)
        await run_through(whole)
        await check(whole)
        wanted = outcome(whole)
        assert wanted["c"] == 1
        assert sum(wanted.values()) == 2
        assert whole.steps.count > 30
        died = set()
        for k in range(1, whole.steps.count + 1):
            site = await new_site(migrated_url, engine, monkeypatch, k)
            await run_through(site)
            assert len(site.epochs) == 2, f"it died once, at step {k}"
            died.add(site.steps.at)
            await check(site)
            assert sum(outcome(site).values()) == 2, (k, site.steps.at)
            assert outcome(site)["c"] == 1, (k, site.steps.at)
        assert {"SendStart", "SendStop", "ReplyTo", "before COMMIT", "after the commit"} <= died
    finally:
        await engine.dispose()


async def test_commands_of_a_deposed_leader_are_refused(
    migrated_url: str, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead leader's command arrives too late.

    It arrives after the next leader's command: the node refuses it.
    """
    try:
        site = await new_site(migrated_url, engine, monkeypatch, 0)
        first = await lead(site, rounds=2)
        sent = site.agents["n1"].instances
        late = next(iter(sent.values())).command
        await run_through(site)
        assert first.loop.state.epoch < site.epochs[-1]
        assert [e.code for e in [site.agents["n1"].start(late, site.now)] if e is not None] == [StaleToken.code]
    finally:
        await engine.dispose()
