"""Device time of no request, and cached weights, are charged once, to who needed them."""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from services.scheduler.adapters.database import connect, migrate, plain_url
from services.scheduler.adapters.held_memory import HeldMemory
from services.scheduler.adapters.leadership import leadership
from services.scheduler.adapters.ledger import Ledger
from services.scheduler.adapters.repository import Repository, StaleEpoch
from services.scheduler.adapters.spending import Spending
from services.scheduler.domain.device_accounts import SETTLED_AFTER_S
from services.scheduler.domain.holdings import HOUR_S
from services.scheduler.domain.state.changes import Put
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Instance
from shared.contracts.engine import BackgroundWork, EngineLoad
from shared.contracts.loader import CachedModel, LoaderStatus
from shared.contracts.node import EndedEngine, InstanceStatus, NodeStatus
from shared.contracts.prices import GIB_HOUR, Prices
from shared.contracts.usage import (
    HOURLY_HOURS,
    RETENTION_HOURS,
    Counts,
    ReportUsage,
    ResponseUsage,
    UsageRow,
    ViewSpending,
    ViewUsage,
)
from tests.integration.scheduler.charged_plans import plan, waited
from tests.support.node_statuses import instance, status
from tests.unit.scheduler.world import World

HOUR = 500_000
START = float(HOUR * HOUR_S)
PRICES = Prices(
    currency="EUR", compute_seconds={"cuda": Decimal(2), "cpu": Decimal(1)}, gib_hours={"cache": Decimal(3), "host": Decimal(100)}
)


@pytest.fixture
async def engine(migrated_url: str) -> AsyncIterator[AsyncEngine]:
    engine = connect(migrated_url)
    await migrate(engine)
    yield engine
    await engine.dispose()


def owned(**owners: str) -> ClusterState:
    w = World()
    w.node()
    for name, owner in owners.items():
        w.model(name, owner=owner)
    return w.state


def working(name: str, *devices: str, pid: int = 7, **seconds: float) -> InstanceStatus:
    """Return an instance whose engine has worked so long for each plan; `own`: for none."""
    work = tuple(BackgroundWork(plan_id=p if p != "own" else "", seconds=s) for p, s in seconds.items())
    fields = {"load": EngineLoad(background=work), "pids": (pid,) if pid else ()}
    return instance(name, 1, *devices).model_copy(update=fields)


def report(seq: int, *instances: InstanceStatus) -> NodeStatus:
    return status({"cuda:0": 0}, *instances).model_copy(update={"seq": seq})


async def by_key(ledger: Ledger, *by: Any) -> dict[Any, Counts]:
    rows = (await ledger.view(ViewUsage(since=0, by=by or ("key",)))).rows
    return {tuple(getattr(r, name) for name in by) if by else r.key: r.counts for r in rows}


async def test_requests_that_needed_the_memory_share_the_work_and_owners_pay_for_the_rest(
    engine: AsyncEngine, migrated_url: str
) -> None:
    ledger, repository, state = Ledger(engine, PRICES), Repository(engine), owned(small="team", large="boss")
    async with leadership(plain_url(migrated_url)) as term:
        await repository.commit(term.epoch, [Put(plan("p", "large", measured_ms=0.0)), Put(plan("q", "large", measured_ms=0.0))])
        used = Counts(requests=1, compute_cuda_us=1_000_000)
        own = ReportUsage(
            spool="own", start=0, end=1, rows=(UsageRow(hour=HOUR, key="team", model="small", adapter="", counts=used),)
        )
        await ledger.record(term.epoch, own, HOUR)
        for key, requests in (("alice", 3), ("bob", 1)):
            await ledger.record(term.epoch, waited(key, "p", "large", key, requests, start_s=0.0), HOUR)
        meter = HeldMemory(ledger, state, term.epoch, longest_s=5.0)
        await meter.load()
        meter.on_status(report(1, working("small-1", "cuda:0", "cuda:1", own=2.0, p=4.0, q=0.5)), START)
        await meter.flush(START)
        found = await by_key(ledger, "key", "model")
        assert {name: c.compute_cuda_us for name, c in found.items()} == {
            ("team", "small"): 1_000_000 + 2 * 2_000_000,
            ("alice", "large"): 6_000_000,
            ("bob", "large"): 2_000_000,
            ("boss", "small"): 1_000_000,  # no request has waited for its model's start q
        }
        assert {name: c.background_s for name, c in found.items()} == {
            ("team", "small"): 4.0,
            ("alice", "large"): 6.0,
            ("bob", "large"): 2.0,
            ("boss", "small"): 1.0,
        }
        rows = (await ledger.view(ViewUsage(since=0, by=("key",)))).rows
        assert {r.key: r.cost.compute for r in rows if r.cost} == {"team": 10, "alice": 12, "bob": 4, "boss": 2}
        spending = Spending(ledger)
        query = ViewSpending(keys=("team", "alice", "boss"), has_device_seconds_budget=True)
        spent = (await spending.view(query, HOUR)).keys
        assert {k: (s.day_device_s, s.day_money) for k, s in spent.items()} == {
            "team": (5.0, Decimal(10)),
            "alice": (6.0, Decimal(12)),
            "boss": (1.0, Decimal(2)),
        }
        await ledger.record(term.epoch, waited("late", "q", "large", "carol", start_s=0.0), HOUR)
        found = await by_key(ledger)
        assert ("boss" in found, found["carol"].background_s) == (False, 1.0)
        meter.on_status(report(2, working("small-1", "cuda:0", "cuda:1", own=3.0, p=4.0, q=0.5)), START + 1)
        await meter.flush(START)
        spending.note_held()
        assert (await spending.view(query, HOUR)).keys["team"].day_device_s == 7.0
        with pytest.raises(StaleEpoch):
            await ledger.record_background(term.epoch - 1, (), HOUR, lambda _: "")
        before = await by_key(ledger, "key", "model")
        await ledger.prune(term.epoch, HOUR + HOURLY_HOURS + 48)
        assert await by_key(ledger, "key", "model") == before, "summed up by day"
        await ledger.prune(term.epoch, HOUR + RETENTION_HOURS + 48)
        assert not await by_key(ledger)


@pytest.mark.parametrize("seed", range(6))
async def test_the_sum_over_keys_is_what_the_engines_worked(
    engine: AsyncEngine, migrated_url: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Engines work, restart under their ids and end; statuses overtake each other; leaders end."""
    rng = random.Random(seed)
    ledger, repository = Ledger(engine), Repository(engine)
    state = owned(a="team", b="", c="boss")
    plans = [f"p{n}" for n in range(4)]
    shown: dict[str, dict[str, float]] = {f"{m}-{n}": defaultdict(float) for m in "abc" for n in range(2)}
    pids = dict.fromkeys(shown, 1)
    worked, waits, seq = 0.0, 0, 0
    record = ledger.record_background

    async def lose_some_replies(*arguments: Any) -> None:
        if rng.random() < 0.2:
            raise SQLAlchemyError
        await record(*arguments)
        if rng.random() < 0.2:
            raise SQLAlchemyError

    for _ in range(3):  # terms of leaders
        async with leadership(plain_url(migrated_url)) as term:
            await repository.commit(term.epoch, [Put(plan(p, rng.choice("abc"), measured_ms=0.0)) for p in plans])
            meter = HeldMemory(ledger, state, term.epoch, longest_s=5.0)
            await meter.load()
            monkeypatch.setattr(ledger, "record_background", lose_some_replies)
            for _ in range(30):
                name = rng.choice(list(shown))
                more = rng.randint(1, 5000) / 1000
                shown[name][rng.choice(["own", *plans])] += more
                worked += more
                seq += 1
                engines = [working(n, "cuda:0", pid=pids[n], **s) for n, s in shown.items()]
                meter.on_status(report(seq, *engines), START + seq)
                meter.on_status(report(seq - 1, *engines[1:]), START + seq)
                if rng.random() < 0.1:  # an engine ends, and another one gets its instance
                    meter.on_status(report(seq, *(e.model_copy(update={"pids": ()}) for e in engines)), START + seq)
                    shown[name], pids[name] = defaultdict(float), pids[name] + 1
                if rng.random() < 0.3:
                    try:
                        await meter.flush(START + seq)
                    except SQLAlchemyError:
                        continue
                if rng.random() < 0.1:
                    waits += 1
                    wait = waited(f"s{waits}", rng.choice(plans), "b", f"key {waits % 3}", rng.randint(1, 3), start_s=0.0)
                    await ledger.record(term.epoch, wait, HOUR)
            monkeypatch.setattr(ledger, "record_background", record)
            await meter.flush(START + seq)  # else the last readings wait for the next leader's first statuses
        for by in ((), ("key",), ("key", "model", "hour"), ("model", "day")):
            rows = (await ledger.view(ViewUsage(since=0, by=by))).rows
            assert sum(r.counts.background_s for r in rows) == pytest.approx(worked)
            assert sum(r.counts.compute_cuda_us for r in rows) == pytest.approx(worked * 1e6, abs=len(rows))


async def test_cached_weights_are_charged_to_the_owners_of_their_models(engine: AsyncEngine, migrated_url: str) -> None:
    """The sum over models is the integral of the host memory that the loader reports."""
    w = World()
    w.node()
    for name, owner in (("a", "team"), ("b", "boss"), ("c", "carol")):
        w.model(name, owner=owner)
    shared = w.state.models["a"].card.info.revision

    alone = w.state.models["c"].card.info.revision
    ledger, gib = Ledger(engine, PRICES), 2**30
    cached = (
        CachedModel(weights_id=shared, tier="dram", nbytes=4 * gib),
        CachedModel(weights_id=f"{alone}.layers-0-2-4", tier="dram", nbytes=gib),
        CachedModel(weights_id="of no model", tier="dram", nbytes=gib),
        CachedModel(weights_id=alone, tier="ssd", nbytes=50 * gib),
    )
    first = LoaderStatus(node="n", boot_id="b", cached=cached, dram_bytes=7 * gib)
    async with leadership(plain_url(migrated_url)) as term:
        meter = HeldMemory(ledger, w.state, term.epoch, longest_s=2 * HOUR_S)
        await meter.load()
        meter.on_loader_status(first, START)
        meter.on_status(report(1), START)  # the node's own clock is another one
        meter.on_loader_status(first.model_copy(update={"cached": (), "dram_bytes": 0}), START + HOUR_S)
        await meter.flush(START)
        meter.on_loader_status(first, START + 2 * HOUR_S)
        await meter.flush(START)
    found = await by_key(ledger, "key", "model")
    assert {name: c.cached_gib_h for name, c in found.items()} == {("team", "a"): 4, ("carol", "c"): 1, ("", ""): 2}
    assert sum(c.held_cache_byte_s for c in found.values()) == 7 * GIB_HOUR
    rows = (await ledger.view(ViewUsage(since=0, by=("key",)))).rows
    assert {r.key: r.cost.cache for r in rows if r.cost} == {"team": 12, "carol": 3, "": 6}
    assert sum(r.cost.total for r in rows if r.cost) == 21
    async with leadership(plain_url(migrated_url)) as term:  # the next leader continues
        meter = HeldMemory(ledger, w.state, term.epoch, longest_s=2 * HOUR_S)
        await meter.load()
        meter.on_loader_status(first, START + 3 * HOUR_S)
        await meter.flush(START)
    assert (await by_key(ledger))["team"].cached_gib_h == 8


async def test_owners_pay_for_starts_that_requests_gave_up(engine: AsyncEngine, migrated_url: str) -> None:
    ledger, repository = Ledger(engine), Repository(engine)
    given_up, waited_for = plan("given-up", "a", measured_ms=8000.0), plan("waited", "a", measured_ms=2000.0)
    moved = plan("moved", "b", measured_ms=1000.0, trigger="migrate")
    async with leadership(plain_url(migrated_url)) as term:
        await repository.commit(term.epoch, [Put(p) for p in (given_up, waited_for, moved)])
        await ledger.record(term.epoch, waited("s", "waited", "a", "alice", start_s=2.0), HOUR)
        starts: dict[float, dict[Any, float]] = {}
        for before in (START, START + 1):  # not yet; then they are
            await ledger.record_starts(term.epoch, START - 10, lambda model: f"owner of {model}", before)
            starts[before] = {k: c.cold_start_s for k, c in (await by_key(ledger)).items()}
        assert starts[START] == {"alice": 2.0}
        assert starts[START + 1] == {"alice": 2.0, "owner of a": 8.0, "owner of b": 1.0}
        await ledger.record(term.epoch, waited("late", "given-up", "a", "bob", start_s=8.0), HOUR)
        assert {k: c.cold_start_s for k, c in (await by_key(ledger)).items()} == {
            "alice": 2.0,
            "bob": 4.0,
            "owner of a": 4.0,
            "owner of b": 1.0,
        }


def charging(name: str, *devices: str, pid: int = 7, charged: float | None = None, busy: float = 1.0) -> InstanceStatus:
    """Return an instance whose engine has charged so many seconds to requests that ended."""
    fields = {"load": EngineLoad(busy_s=busy, charged_s=charged), "pids": (pid,) if pid else ()}
    return instance(name, 1, *devices).model_copy(update=fields)


def entity(name: str, *, sent_at: float) -> Instance:
    """Return the scheduler's own record of an instance."""
    model = name.partition("-")[0]
    return Instance(name, "p", model, 1, "r", "n", ("cuda:0",), 1, 1, 0, sent_at, sent_at, sent_at=sent_at)


def recorded(spool: str, model: str, seconds: float, answer_id: str = "") -> ReportUsage:
    row = UsageRow(hour=HOUR, key="alice", model=model, counts=Counts(requests=1, compute_cuda_us=round(seconds * 1e6)))
    responses = (ResponseUsage(answer_id=answer_id, row=row),) if answer_id else ()
    return ReportUsage(spool=spool, start=0, end=1, rows=() if answer_id else (row,), responses=responses)


class Accounts:
    """A leader's meter that looks at the accounts every `SETTLED_AFTER_S`."""

    def __init__(self, ledger: Ledger, state: ClusterState, epoch: int, start: float = START) -> None:
        self.ledger, self.now, self.epoch, self.seq = ledger, start, epoch, 0
        self.meter = HeldMemory(ledger, state, epoch, longest_s=5.0)

    async def settle(self, *engines: InstanceStatus) -> dict[str, float]:
        """Return the seconds for no request by key."""
        for _ in range(2):
            self.now, self.seq = self.now + SETTLED_AFTER_S, self.seq + 1
            self.meter.on_status(report(self.seq, *engines), self.now)
            await self.meter.flush(self.now)
        return {key: counts.background_s for key, counts in (await by_key(self.ledger)).items() if counts.background_s}


async def test_owners_pay_for_charges_that_no_gateway_records_until_one_does(engine: AsyncEngine, migrated_url: str) -> None:
    ledger, state = Ledger(engine, PRICES), owned(small="team", large="boss")
    async with leadership(plain_url(migrated_url)) as term:
        accounts = Accounts(ledger, state, term.epoch)  # without the clock of the accounts: no engine is older
        await ledger.record(term.epoch, recorded("a", "small", 3.0), HOUR)
        small = charging("small-1", "cuda:0", "cuda:1", charged=2.0), charging("large-1", "cuda:0", charged=0.5)
        assert await accounts.settle(*small) == {"team": 1.0, "boss": 0.5}
        assert await accounts.settle(*small) == {"team": 1.0, "boss": 0.5}, "it is charged once"
        for spool in ("b", "c"):  # two gateways record the same response
            await ledger.record(term.epoch, recorded(spool, "small", 0.75, answer_id="r1"), HOUR)
        assert await accounts.settle(*small) == {"team": 0.25, "boss": 0.5}
        ended = charging("small-1", "cuda:0", "cuda:1", pid=0, charged=2.5).model_copy(update={"ended_pid": 7})
        assert await accounts.settle(ended) == {"team": 1.25, "boss": 0.5}, "killed, with open requests"
        with pytest.raises(StaleEpoch):
            await ledger.settle_accounts(term.epoch - 1, {}, (), HOUR, lambda _: "")
    async with leadership(plain_url(migrated_url)) as term:  # the next leader
        accounts = Accounts(ledger, state, term.epoch, START + 3600)
        assert await accounts.settle(ended) == {"team": 1.25, "boss": 0.5}
        await ledger.record(term.epoch, recorded("d", "small", 0.5), HOUR)
        assert await accounts.settle(ended) == {"team": 0.75, "boss": 0.5}
        rows = (await ledger.view(ViewUsage(since=0, by=("key",)))).rows
        assert sum(r.counts.compute_cuda_us for r in rows) == 5_500_000


async def test_engines_before_the_update_are_charged_nothing_afterwards(engine: AsyncEngine, migrated_url: str) -> None:
    """Neither those that do not say what they charge, nor the past of those that do."""
    ledger, state = Ledger(engine, PRICES), owned(small="team", large="boss")
    state.instances["large-1"] = entity("large-1", sent_at=1.0)
    async with leadership(plain_url(migrated_url)) as term:
        accounts = Accounts(ledger, state, term.epoch)
        await accounts.meter.load()
        assert await accounts.settle(charging("large-1", "cuda:0", charged=100.0)) == {}
        assert await accounts.settle(charging("large-1", "cuda:0", charged=101.0)) == {"boss": 1.0}
        await ledger.record(term.epoch, recorded("a", "small", 50.0), HOUR)  # charged by an earlier engine
        earlier, later = charging("small-1", "cuda:0", busy=50.0), charging("small-2", "cuda:0", charged=0.0)
        assert await accounts.settle(earlier, later) == {"boss": 1.0}
        later = charging("small-2", "cuda:0", charged=2.0)
        assert await accounts.settle(later) == {"boss": 1.0, "team": 2.0}


async def test_an_engine_that_ended_before_its_reading_is_recorded_is_charged_from_its_start(
    engine: AsyncEngine, migrated_url: str
) -> None:
    """The scheduler forgets an instance that has ended before it records what was read of it."""
    state = owned(small="team")
    state.instances["small-1"] = entity("small-1", sent_at=START)
    async with leadership(plain_url(migrated_url)) as term:
        ledger = Ledger(engine)
        accounts = Accounts(ledger, state, term.epoch)
        await accounts.meter.load()
        accounts.meter.on_status(report(0, charging("small-1", "cuda:0", charged=1.5)), START)
        del state.instances["small-1"]
        assert await accounts.settle() == {"team": 1.5}


async def test_the_next_leader_reads_the_meters_of_engines_that_ended_before_its_term(
    engine: AsyncEngine, migrated_url: str
) -> None:
    ledger, state = Ledger(engine), owned(small="team")
    async with leadership(plain_url(migrated_url)) as term:
        accounts = Accounts(ledger, state, term.epoch)
        assert await accounts.settle(charging("small-1", "cuda:0", "cuda:1", charged=1.5)) == {"team": 3.0}
    ended = EndedEngine(
        instance_id="small-1",
        pid=7,
        model="small",
        device_kind="cuda",
        device_count=2,
        charged_s=2.0,
        background=(BackgroundWork(plan_id="", seconds=0.25),),
    )
    async with leadership(plain_url(migrated_url)) as term:
        accounts = Accounts(ledger, state, term.epoch, START + 3600)
        await accounts.meter.load()
        for seq, asked in enumerate((ended, ended), start=-2):  # two statuses were asked for
            accounts.meter.on_status(report(seq).model_copy(update={"ended_engines": (asked,)}), accounts.now)
        assert await accounts.settle() == {"team": 4.5}
        assert await accounts.settle() == {"team": 4.5}


@pytest.mark.parametrize("seed", range(4))
async def test_the_ledger_has_what_engines_charged_whatever_was_lost(
    engine: AsyncEngine, migrated_url: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Records are late or lost, engines and leaders end, and replies of the database are lost."""
    rng, ledger, state = random.Random(seed), Ledger(engine), owned(a="team", b="boss")
    charged, pids = {"a-1": 0.0, "b-1": 0.0}, {"a-1": 1, "b-1": 1}
    late, spools, total = list[ReportUsage](), 0, 0.0
    settle = ledger.settle_accounts

    async def lose_some_replies(*arguments: Any) -> Any:
        found = await settle(*arguments)
        if rng.random() < 0.3:
            raise SQLAlchemyError
        return found

    monkeypatch.setattr(ledger, "settle_accounts", lose_some_replies)
    start = START
    for _ in range(3):
        async with leadership(plain_url(migrated_url)) as term:
            accounts = Accounts(ledger, state, term.epoch, start)
            for _ in range(8):
                name, seconds = rng.choice(list(charged)), rng.randint(1, 1000) / 1000
                charged[name] += seconds
                total += seconds
                spools += 1
                record = recorded(f"s{spools}", name[0], seconds * rng.choice([1.0, 1.0, 0.9]))
                match rng.choice(["at once", "at once", "late", "lost"]):
                    case "at once":
                        await ledger.record(term.epoch, record, HOUR)
                    case "late":
                        late.append(record)
                if rng.random() < 0.3 and late:
                    await ledger.record(term.epoch, late.pop(0), HOUR)
                engines = [charging(n, "cuda:0", pid=pids[n], charged=round(s, 6)) for n, s in charged.items()]
                with contextlib.suppress(SQLAlchemyError):
                    await accounts.settle(*engines)
                if rng.random() < 0.2:
                    charged[name], pids[name] = 0.0, pids[name] + 1
            start = accounts.now
    monkeypatch.setattr(ledger, "settle_accounts", settle)
    async with leadership(plain_url(migrated_url)) as term:
        for record in late:
            await ledger.record(term.epoch, record, HOUR)
        for _ in range(2):
            await Accounts(ledger, state, term.epoch, start + 100).settle(
                *(charging(n, "cuda:0", pid=pids[n], charged=round(s, 6)) for n, s in charged.items())
            )
    rows = (await ledger.view(ViewUsage(since=0, by=("key",)))).rows
    assert sum(r.counts.compute_cuda_us for r in rows) == pytest.approx(total * 1e6, abs=spools + len(rows))


async def test_work_of_an_engine_that_was_idle_for_weeks_counts_once(engine: AsyncEngine, migrated_url: str) -> None:
    """The ledger forgets readings after 40 days; those of running engines are recorded again."""
    ledger, day = Ledger(engine), 24 * HOUR_S
    async with leadership(plain_url(migrated_url)) as term:
        meter = HeldMemory(ledger, owned(a="team"), term.epoch, longest_s=5.0)
        await meter.load()
        for number, (at, seconds) in enumerate(((0, 2.0), (30, 2.0), (60, 2.0), (90, 3.0))):
            for second in range(2):  # the status after the first one of a day repeats the reading
                now = START + at * day + second
                meter.on_status(report(2 * number + second, working("a-1", "cuda:0", own=seconds)), now)
                await meter.flush(now)
            await ledger.prune(term.epoch, HOUR + at * 24)
        assert (await by_key(ledger))["team"].background_s == 3.0
