"""Evictions, preemptions and restarts are charged once, to the requests that needed the memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from services.scheduler.adapters.database import connect, migrate, plain_url
from services.scheduler.adapters.leadership import leadership
from services.scheduler.adapters.ledger import Ledger
from services.scheduler.adapters.repository import Repository, StaleEpoch
from services.scheduler.adapters.spending import Spending
from services.scheduler.domain.state.changes import Put
from shared.contracts.admin import ExplainPlan, PlanExplained
from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.plans import PlanRecord, Preemption
from shared.contracts.prices import Prices
from shared.contracts.usage import RETENTION_HOURS, Counts, UsageSum, ViewSpending, ViewUsage
from tests.integration.gateway.api_keys import add_key
from tests.integration.gateway.conftest import until
from tests.integration.scheduler.charged_plans import AT, HOUR, plan, waited
from tests.integration.scheduler.conftest import Site, spec
from tests.integration.scheduler.conftest import process as scheduler_process
from tests.integration.scheduler.metering import ask, usage
from tests.integration.scheduler.serving import gateway, serving_node
from tests.support.fake_engine import Run, speak
from tests.support.fake_node import MIB

PRICES = Prices(currency="EUR", device_seconds={"cuda": Decimal(2)}, clearing_seconds={"cuda": Decimal(10)})
STARTS = ("cold_start_s", "restart_s", "victims", "clearing_s", "clearing_device_s", "cold_device_s")


@pytest.fixture
async def engine(migrated_url: str) -> AsyncIterator[AsyncEngine]:
    engine = connect(migrated_url)
    await migrate(engine)
    yield engine
    await engine.dispose()


def spans(rng: random.Random) -> tuple[PhaseSpan, ...]:
    """Return phases that overlap, leave gaps and end after the start, at random."""
    phases = rng.sample((Phase.RESERVE, Phase.CONTAINER, Phase.LOAD, Phase.INIT), rng.randint(1, 4))
    return tuple(PhaseSpan(phase=p, start_ms=rng.uniform(-50, 5000), duration_ms=rng.uniform(0, 5000)) for p in phases)


def owner(model: str) -> str:
    return f"owner of {model}"


async def view(ledger: Ledger, *by: Any, **query: Any) -> tuple[UsageSum, ...]:
    return (await ledger.view(ViewUsage(since=0, by=by, **query))).rows


async def by_key(ledger: Ledger) -> dict[str, Counts]:
    return {str(row.key): row.counts for row in await view(ledger, "key")}


async def test_clearing_is_shared_by_who_waited_and_victims_do_not_pay_for_restarts(engine: AsyncEngine, migrated_url: str) -> None:
    ledger, repository = Ledger(engine, PRICES), Repository(engine)
    preempting = plan("p", "large", victims=2, cleared_s=3.0, devices=2)
    restart = plan("r", "small", victims=1, cleared_s=1.0, measured_ms=6000.0, caused_by="p")
    async with leadership(plain_url(migrated_url)) as term:
        await repository.commit(term.epoch, [Put(preempting), Put(restart)])
        for n, (plan_id, model, key, requests) in enumerate(
            (("p", "large", "alice", 3), ("p", "large", "bob", 1), ("r", "small", "carol", 5))
        ):
            devices = 2 if plan_id == "p" else 1
            await ledger.record(term.epoch, waited(f"s{n}", plan_id, model, key, requests, devices=devices), HOUR)
        assert (await by_key(ledger))["carol"].cold_start_s == 8.0
        for _ in range(2):  # also after a lost reply
            await ledger.record_starts(term.epoch, AT - 10, owner)
        found = await by_key(ledger)
        alice, bob, carol = (found[key] for key in ("alice", "bob", "carol"))
        # Three quarters and a quarter of 8 s of the start, and of 6 s of the restart.
        assert (alice.cold_start_s, alice.restart_s, bob.cold_start_s, bob.restart_s) == (10.5, 4.5, 3.5, 1.5)
        assert (alice.victims, alice.clearing_s, alice.clearing_device_s) == (1.5, 2.25, 4.5)
        assert (bob.victims, bob.clearing_s, bob.clearing_device_s) == (0.5, 0.75, 1.5)
        assert (carol.cold_start_s, carol.restart_s, carol.victims, carol.clearing_s) == (0, 0, 1, 1.0)
        (row,) = await view(ledger, "key", "model", "adapter", "hour", model="small")
        assert (row.key, row.model, row.adapter, row.hour) == ("carol", "small", "", HOUR)
        spent = (await Spending(ledger).view(ViewSpending(keys=("alice", "carol")), HOUR)).keys
        rows = {row.key: row.cost for row in await view(ledger, "key")}
        alices, carols = rows["alice"], rows["carol"]
        assert alices is not None
        assert carols is not None
        # The start on two devices, the restart on one.
        assert [alices.cold_starts, alices.clearing, alices.total] == [2 * (12 + Decimal("4.5")), 45, 78]
        assert [carols.cold_starts, carols.clearing] == [0, 10]
        assert {key: s.day_money for key, s in spent.items()} == {"alice": 78, "carol": 10}
        with pytest.raises(StaleEpoch):
            await ledger.record_starts(term.epoch - 1, AT - 10, owner)
        await ledger.prune(term.epoch, HOUR + RETENTION_HOURS + 24)
        assert await view(ledger, "key") == ()


async def test_owners_pay_for_starts_without_a_request(engine: AsyncEngine, migrated_url: str) -> None:
    ledger, repository = Ledger(engine), Repository(engine)
    plans = (
        plan("woken", "a", victims=1, cleared_s=2.0, trigger="wake"),
        plan("failed", "b", victims=1, cleared_s=3.0, outcome="failed", measured_ms=None),
        plan("given-up", "c", victims=1, outcome="cancelled", measured_ms=None),  # its memory was never free
        plan("waits", "d", victims=1, cleared_s=4.0, outcome="pending", measured_ms=None),
        plan("moved", "e", victims=1, cleared_s=5.0, trigger="migrate", caused_by="failed"),
        plan("unknown", "f", victims=0, caused_by="not kept"),
    )
    async with leadership(plain_url(migrated_url)) as term:
        await repository.commit(term.epoch, [Put(p) for p in plans])
        await ledger.record_starts(term.epoch, AT - 10, owner)
        found = {(row.key, row.model): row.counts for row in await view(ledger, "key", "model")}
        assert {name: (c.victims, c.clearing_s, c.restart_s, c.cold_start_s) for name, c in found.items()} == {
            ("owner of a", "a"): (1, 2, 0, 8),
            # The destination of requests that moved for it clears and starts at its cost.
            ("owner of b", "b"): (2, 8, 8, 8),
        }
        await ledger.record(term.epoch, waited("s", "failed", "b", "alice"), HOUR)
        assert set(await by_key(ledger)) == {"owner of a", "alice"}


@pytest.mark.parametrize("seed", range(8))
async def test_the_sum_over_keys_is_the_sum_over_plans(engine: AsyncEngine, migrated_url: str, seed: int) -> None:
    """Plans, waits and causes at random, recorded and repeated in any order."""
    rng = random.Random(seed)
    ledger, repository = Ledger(engine), Repository(engine)
    plans: list[PlanRecord] = []
    for n in range(rng.randint(1, 30)):
        victims = rng.choice((0, 0, 1, 3))
        is_ready = rng.random() < 0.8
        fields: dict[str, Any] = {
            "cleared_s": rng.uniform(0.1, 9) if victims and rng.random() < 0.9 else None,
            "created": AT + rng.uniform(0, 5 * 3600),
            "trigger": rng.choice(("demand", "demand", "retry", "wake", "park", "migrate")),
            "outcome": "ready" if is_ready else rng.choice(("failed", "cancelled")),
            "measured_ms": rng.uniform(10, 9000) if is_ready else None,
            "caused_by": rng.choice(plans).plan_id if plans and rng.random() < 0.4 else None,
            "devices": rng.choice((1, 2)),
            "measured": spans(rng),
        }
        plans.append(plan(f"p{n}", rng.choice("abc"), victims, **fields))
    starts = {p.plan_id: p.measured_ms / 1e3 for p in plans if p.measured_ms is not None}
    asked = [p for p in plans if p.plan_id in starts and rng.random() < 0.7]
    reports = [
        waited(f"{p.plan_id}-{key}", p.plan_id, p.model, f"key {key}", rng.randint(1, 5), start_s=starts[p.plan_id])
        for p in asked
        for key in rng.sample(range(4), rng.randint(1, 3))
    ]
    async with leadership(plain_url(migrated_url)) as term:
        await repository.commit(term.epoch, [Put(p) for p in plans])
        work = [*reports, *rng.choices(reports, k=len(reports) // 2)] if reports else []
        rng.shuffle(work)
        for report in work:
            if rng.random() < 0.2:
                await ledger.record_starts(term.epoch, AT - 10, owner)
            await ledger.record(term.epoch, report, HOUR)
        await ledger.record_starts(term.epoch, AT - 10, owner)
        found = [await view(ledger, *by) for by in ((), ("key",), ("key", "model", "day"), ("key", "model", "hour"))]
    cleared = [p for p in plans if p.chosen is not None and p.chosen.cleared_ms is not None]
    caused = [p for p in plans if p.caused_by is not None and p.plan_id in starts]
    unasked = [p for p in plans if p.trigger in ("wake", "park") and p.plan_id in starts]
    paid = {p.plan_id for p in (*asked, *caused, *unasked)}
    expected = {
        "victims": sum(len(p.chosen.victims) for p in cleared if p.chosen),
        "clearing_s": sum(p.chosen.cleared_ms / 1e3 for p in cleared if p.chosen and p.chosen.cleared_ms),
        "restart_s": sum(starts[p.plan_id] for p in caused),
        "cold_start_s": sum(starts[plan_id] for plan_id in paid),
    }
    for rows in found:
        for name, amount in expected.items():
            assert sum(getattr(r.counts, name) for r in rows) == pytest.approx(amount), name
        assert all(getattr(r.counts, name) >= 0 for r in rows for name in STARTS)
        for row in rows:
            assert sum(row.cold_start_phases_s.values()) == pytest.approx(row.counts.cold_start_s), "the phases tile the starts"


async def test_a_plan_keeps_its_preemption_and_its_cause(engine: AsyncEngine, migrated_url: str) -> None:
    given = plan("p", "a", victims=1, cleared_s=2.0, preempted=Preemption(plan_id="q", at=AT), caused_by="c")
    repository = Repository(engine)
    async with leadership(plain_url(migrated_url)) as term:
        await repository.commit(term.epoch, [Put(given)])
        assert await repository.plan("p") == given
        assert (await repository.load(term.epoch, AT)).last_plan_of("a") == given


async def kept(site: Site, plan_id: str) -> PlanRecord:
    explained: PlanExplained = await site.ask(ExplainPlan(plan_id=plan_id), PlanExplained)
    return explained.plan


async def test_a_preempting_key_pays_for_the_restart_through_kills_of_the_scheduler(site: Site, tmp_path: Path) -> None:
    runs, released = asyncio.Queue[Run](), asyncio.Event()

    async def behave(run: Run) -> None:
        runs.put_nowait(run)
        if runs.qsize() == 1:  # the first request keeps its engine busy
            await released.wait()
        await speak(run)

    node = await serving_node(site, budget=400 * MIB, behaviour=behave)
    settings = {"THAW_PREEMPT_AFTER": "0.5", "THAW_MIN_ACTIVE": "0.2"}
    scheduler = await scheduler_process(site, "first", **settings)
    await site.add(spec("a"), spec("b"))
    async with gateway(site, admin_key="root", home=tmp_path / "home") as served:
        for key in ("alice", "bob"):
            await add_key(served, key, f"sk-{key}")
        alices = asyncio.create_task(ask(served.base, "sk-alice", "a"))
        await site.until(lambda: runs.qsize() == 1)
        await node.publish()
        bobs = asyncio.create_task(ask(served.base, "sk-bob", "b"))
        await site.until(lambda: any(i.state is InstanceState.DRAINING for i in node.of("a")))
        assert not node.starts("b")
        released.set()
        await alices
        await node.publish()
        await bobs
        await ask(served.base, "sk-alice", "a")
        assert len(node.starts("a")) == 2
        for name in ("second", "third"):  # the first one may have recorded nothing
            scheduler.kill()
            await scheduler.wait()
            scheduler = await scheduler_process(site, name, **settings)
            found: dict[tuple[str, ...], Counts] = {}

            async def charged() -> bool:
                nonlocal found
                found = await usage(served.base)
                return sum(c.requests for c in found.values()) == 3 and sum(c.victims for c in found.values()) == 2

            await until(charged)
            alice, bob = found["alice", "a"], found["bob", "b"]
            assert (bob.victims, alice.victims) == (1, 1)
            assert (alice.cold_requests, alice.restart_s, bob.cold_requests) == (2, 0, 1)
            assert bob.clearing_s > 0.0
            assert bob.cold_start_s > bob.restart_s > 0.0
            # Of alice's two starts the second one is bob's.
            first = await kept(site, node.starts("a")[0].plan_id)
            second = await kept(site, node.starts("a")[1].plan_id)
            assert (first.preempted is not None, second.caused_by) == (True, node.starts("b")[0].plan_id)
            assert bob.restart_s == pytest.approx((second.measured_ms or 0) / 1e3)
            cold = await kept(site, node.starts("b")[0].plan_id)
            assert cold.measured_ms is not None
            assert bob.clearing_s <= cold.measured_ms / 1e3
    scheduler.terminate()
    await scheduler.wait()
