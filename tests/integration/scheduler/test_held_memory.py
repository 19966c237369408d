"""Memory held over time is in the ledger once, through ends of leaders and lost replies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from services.scheduler.adapters import clock
from services.scheduler.adapters.database import connect, migrate, plain_url
from services.scheduler.adapters.held_memory import HeldMemory
from services.scheduler.adapters.leadership import leadership
from services.scheduler.adapters.ledger import HeldBatch, Ledger
from services.scheduler.adapters.repository import StaleEpoch
from services.scheduler.adapters.spending import Spending
from services.scheduler.domain.holdings import HOUR_S
from services.scheduler.domain.state.cluster import ClusterState
from shared.contracts import subjects
from shared.contracts.node import NodeStatus
from shared.contracts.prices import GIB_HOUR, Prices
from shared.contracts.usage import RETENTION_HOURS, Counts, UsageViewed, ViewSpending, ViewUsage
from tests.integration.gateway.api_keys import ADMIN
from tests.integration.gateway.conftest import until
from tests.integration.scheduler.conftest import Site, spec
from tests.integration.scheduler.metering import ask
from tests.integration.scheduler.serving import gateway, serving_node
from tests.support.fake_node import MIB
from tests.support.node_statuses import SUSPENDED, instance, status
from tests.unit.scheduler.world import World

HOUR = 500_000
START = float(HOUR * HOUR_S)
PRICES = Prices(currency="EUR", gib_hours={"cpu": Decimal(2), "host": Decimal("0.5")})


@pytest.fixture
async def engine(migrated_url: str) -> AsyncIterator[AsyncEngine]:
    engine = connect(migrated_url)
    await migrate(engine)
    yield engine
    await engine.dispose()


def owned(name: str = "a", owner: str = "team") -> ClusterState:
    w = World()
    w.node()
    w.model(name, owner=owner)
    return w.state


async def held(ledger: Ledger, by: str = "model") -> dict[str, Counts]:
    dimension = "key" if by == "key" else "model"
    return {str(getattr(r, dimension)): r.counts for r in (await ledger.view(ViewUsage(since=0, by=(dimension,)))).rows}


async def test_the_next_leader_charges_from_where_the_last_one_recorded(engine: AsyncEngine, migrated_url: str) -> None:
    ledger, state = Ledger(engine), owned()
    report = status({"cpu:0": 100}, instance("a-1", 100, "cpu:0"))
    for begin in (0.0, 30.0):
        async with leadership(plain_url(migrated_url)) as term:
            meter = HeldMemory(ledger, state, term.epoch, longest_s=5.0)
            await meter.load()
            for second in range(11):
                meter.on_status(report.model_copy(update={"seq": second}), START + begin + second)
            await meter.flush(START)
            meter.on_status(report.model_copy(update={"seq": 12}), START + begin + 14)  # not recorded: the leader ends
    assert (await held(ledger))["a"].held_cpu_byte_s == 100 * 40
    assert (await held(ledger, "key"))["team"].held_cpu_byte_s == 100 * 40


async def test_a_batch_whose_reply_was_lost_counts_once(
    engine: AsyncEngine, migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(engine)
    async with leadership(plain_url(migrated_url)) as term:
        meter = HeldMemory(ledger, owned(), term.epoch, longest_s=5.0)
        await meter.load()
        report = status({"cpu:0": 100}, instance("a-1", 100, "cpu:0"))
        record = ledger.record_held

        async def lose_the_reply(*arguments: object) -> None:
            await record(*arguments)  # type: ignore[arg-type]
            raise SQLAlchemyError

        monkeypatch.setattr(ledger, "record_held", lose_the_reply)
        for second in range(4):
            meter.on_status(report.model_copy(update={"seq": second}), START + second)
        with pytest.raises(SQLAlchemyError):
            await meter.flush(START)
        monkeypatch.setattr(ledger, "record_held", record)
        meter.on_status(report.model_copy(update={"seq": 4}), START + 4)
        await meter.flush(START)  # the lost one again
        assert (await held(ledger))["a"].held_cpu_byte_s == 300
        await meter.flush(START)
        assert (await held(ledger))["a"].held_cpu_byte_s == 400
        with pytest.raises(StaleEpoch):
            await ledger.record_held(term.epoch - 1, [HeldBatch("n", START + 9, START + 10, {(HOUR, "", "a", "cpu"): 1.0})])
        assert (await held(ledger))["a"].held_cpu_byte_s == 400


async def test_memory_has_a_price_and_counts_towards_the_owners_budget(engine: AsyncEngine, migrated_url: str) -> None:
    ledger = Ledger(engine, PRICES)
    async with leadership(plain_url(migrated_url)) as term:
        meter = HeldMemory(ledger, owned(), term.epoch, longest_s=2 * HOUR_S)
        await meter.load()
        gib = 2**30
        report = status({"cpu:0": 3 * gib}, instance("a-1", 3 * gib, "cpu:0", state=SUSPENDED, snapshot=4 * gib))
        meter.on_status(report, START)
        meter.on_status(report.model_copy(update={"seq": 2}), START + HOUR_S)
        await meter.flush(START)
        (row,) = (await ledger.view(ViewUsage(since=0, by=("key", "model", "adapter", "hour")))).rows
        assert (row.key, row.model, row.adapter, row.hour) == ("team", "a", "", HOUR)
        assert (row.counts.held_cpu_byte_s, row.counts.held_host_byte_s) == (3 * GIB_HOUR, 4 * GIB_HOUR)
        assert row.cost is not None
        assert (row.cost.memory, row.cost.total) == (Decimal(8), Decimal(8))
        spending = Spending(ledger)
        viewed = await spending.view(ViewSpending(keys=("team", "other")), HOUR)
        assert {key: (s.day_money, s.month_money) for key, s in viewed.keys.items()} == {"team": (Decimal(8), Decimal(8))}
        meter.on_status(report.model_copy(update={"seq": 3}), START + 1.5 * HOUR_S)
        await meter.flush(START)
        spending.note_held()
        assert (await spending.view(ViewSpending(keys=("team",)), HOUR)).keys["team"].day_money == 12
        await ledger.prune(term.epoch, HOUR + RETENTION_HOURS + 24)
        assert not (await ledger.view(ViewUsage(since=0, by=("hour",)))).rows


async def test_the_meter_agrees_with_the_nodes_reports(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: AsyncEngine
) -> None:
    """The sum over models is the integral of what the node reports, measured apart, within 1 %."""
    monkeypatch.setattr("services.scheduler.app.FLUSH_PERIOD_S", 0.2)
    reports: list[tuple[float, int]] = []

    async def record(report: NodeStatus) -> None:
        # The meter's time is that of arrival: on a busy machine a report may be late by seconds.
        reports.append((clock.now(), sum(d.reserved_bytes for d in report.devices)))

    await site.mesh.listen(subjects.node_status("node-0"), NodeStatus, record).start()
    await site.mesh.flush()
    node = await serving_node(site, node="node-0", budget=700 * MIB)

    def integrate(until: float) -> float:
        ends = [*(at for at, _ in reports[1:]), until]
        return sum(nbytes * (min(end, until) - at) for (at, nbytes), end in zip(reports, ends, strict=True) if at < until)

    site.scheduler()
    await site.add(spec("a", owner="team"), spec("b"))
    ledger = Ledger(engine)
    async with gateway(site, admin_key="root", home=tmp_path / "home") as served:
        await ask(served.base, "none", "a")
        await ask(served.base, "none", "b")

        async def agrees() -> bool:
            recorded = (await ledger.read_held_clocks()).get(node.node, 0.0)
            answer = await served.http.get("/admin/v1/usage?by=key,model&since=0", headers=ADMIN)
            if answer.status_code != 200 or (await ledger.read_held_clocks()).get(node.node) != recorded:
                return False
            rows = UsageViewed.model_validate(answer.json()).rows
            sums = {(r.key, r.model): r.counts.held_cpu_byte_s for r in rows}
            expected = integrate(recorded)
            both = sums.get(("team", "a"), 0.0) > 0 and sums.get(("", "b"), 0.0) > 0
            return both and sum(sums.values()) == pytest.approx(expected, rel=0.01)

        await until(agrees)


async def test_starts_without_a_request_are_charged_to_the_owner(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.app.FLUSH_PERIOD_S", 0.2)
    await serving_node(site, budget=700 * MIB)
    site.scheduler()
    await site.add(spec("a", owner="team", replicas={"min": 1}), spec("b", owner="team"))
    async with gateway(site, admin_key="root", home=tmp_path / "home") as served:
        await ask(served.base, "none", "b")  # a start that a request asked for, without a key

        async def charged() -> bool:
            answer = await served.http.get("/admin/v1/usage?by=key,model&since=0", headers=ADMIN)
            rows = UsageViewed.model_validate(answer.json()).rows if answer.status_code == 200 else ()
            starts = {(r.key, r.model): (r.counts.requests, r.counts.cold_start_s > 0) for r in rows if r.counts.cold_start_s}
            if starts != {("team", "a"): (0, True), ("", "b"): (1, True)}:
                return False
            paid = [(sum(r.cold_start_phases_s.values()), r.counts.cold_start_s) for r in rows if r.counts.cold_start_s]
            return all(phases == pytest.approx(seconds) for phases, seconds in paid)

        await until(charged)
