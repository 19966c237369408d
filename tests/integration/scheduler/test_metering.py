"""The usage of requests is in the ledger once, by key and model, whichever process is killed."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.scheduler.adapters.database import connect, migrate, plain_url
from services.scheduler.adapters.leadership import leadership
from services.scheduler.adapters.ledger import HeldBatch, Ledger
from services.scheduler.adapters.repository import StaleEpoch
from services.scheduler.adapters.spending import Spending
from shared.contracts.usage import (
    HOURLY_HOURS,
    RETENTION_HOURS,
    ColdWait,
    Counts,
    ReportUsage,
    ResponseUsage,
    UsageRow,
    ViewSpending,
    ViewUsage,
)
from tests.integration.gateway.api_keys import add_key
from tests.integration.gateway.conftest import Served, until
from tests.integration.gateway.queues import queued
from tests.integration.scheduler.conftest import Site, spec
from tests.integration.scheduler.conftest import process as scheduler_process
from tests.integration.scheduler.metering import HOUR, PRICES, ask, usage
from tests.integration.scheduler.serving import gateway, serving_node
from tests.support.fake_node import MIB
from tests.support.servers import kept_port


@pytest.fixture
async def served(site: Site, tmp_path: Path) -> AsyncIterator[Served]:
    await serving_node(site, budget=700 * MIB)
    site.scheduler(prices=PRICES.model_dump_json())
    await site.add(spec("a"), spec("b"))
    async with gateway(site, admin_key="root", home=tmp_path / "home") as served:
        yield served


async def until_counted(base: str, requests: int) -> dict[tuple[str, ...], Counts]:
    found: dict[tuple[str, ...], Counts] = {}

    async def counted() -> bool:
        nonlocal found
        found = await usage(base)
        assert sum(c.requests for c in found.values()) <= requests
        return sum(c.requests for c in found.values()) == requests

    await until(counted)
    return found


async def test_usage_is_metered_by_key_and_model_and_cold_starts_by_who_waited(site: Site, served: Served) -> None:
    for key in ("alice", "bob"):
        await add_key(served, key, f"sk-{key}")
    (node,) = site.nodes
    node.hold_starts = asyncio.Event()
    asking = [asyncio.create_task(ask(served.base, f"sk-{key}", "a")) for key in ("alice", "alice", "alice", "bob")]
    await until(lambda: queued(served, "a", 4))  # all of them wait for the start
    node.hold_starts.set()
    answers = [await task for task in asking]
    answers.append(await ask(served.base, "sk-bob", "b"))
    found = await until_counted(served.base, 5)
    assert {name: (c.requests, c.failed) for name, c in found.items()} == {
        ("alice", "a"): (3, 0),
        ("bob", "a"): (1, 0),
        ("bob", "b"): (1, 0),
    }
    assert sum(c.prompt_tokens for c in found.values()) == sum(a.usage.prompt_tokens for a in answers)
    assert sum(c.completion_tokens for c in found.values()) == sum(a.usage.completion_tokens for a in answers)
    assert {c.compute_cpu_us: c.compute_cuda_us for c in found.values()} == {750_000: 0, 250_000: 0}
    alice, bob = found["alice", "a"], found["bob", "a"]
    assert (alice.cold_requests, bob.cold_requests) == (3, 1)
    assert alice.cold_start_s == pytest.approx(3 * bob.cold_start_s)
    assert bob.cold_start_s > 0
    total = (await usage(served.base, by="model"))[("a",)]
    assert total.cold_start_s == pytest.approx(alice.cold_start_s + bob.cold_start_s)
    metrics = (await served.http.get("/metrics")).text
    assert 'thaw_key_requests_total{gen_ai_request_model="a",thaw_key="alice"} 3.0' in metrics
    assert 'thaw_key_compute_seconds_total{gen_ai_request_model="a",thaw_device_kind="cpu",thaw_key="alice"} 0.75' in metrics
    assert 'thaw_key_cold_requests_total{gen_ai_request_model="a",thaw_key="alice"} 3.0' in metrics


async def test_responses_say_what_they_used(site: Site, tmp_path: Path) -> None:
    """The cold request with its start, a warm one, and a stream before its end."""
    await serving_node(site, budget=700 * MIB)
    site.scheduler()
    await site.add(spec("a"))
    chat: dict[str, Any] = {"model": "a", "messages": [{"role": "user", "content": "Hi"}]}
    async with gateway(site, admin_key="root", home=tmp_path / "home", usage_headers=True) as served:
        cold, warm = [await served.http.post("/v1/chat/completions", json=chat) for _ in range(2)]
        stream = await served.http.post("/v1/chat/completions", json=chat | {"stream": True})
        (counts,) = (await until_counted(served.base, 3)).values()
    tokens = "prompt={prompt_tokens}, cached=0, completion={completion_tokens}".format(**warm.json()["usage"])
    used = f"{tokens}, compute-ms=250.000;device=cpu"
    assert warm.headers["x-thaw-usage"] == used
    prefix, _, start = cold.headers["x-thaw-usage"].partition(", cold-start-ms=")
    start_ms, _, plan = start.partition(";plan=")
    assert prefix == used
    assert float(start_ms) / 1e3 == pytest.approx(counts.cold_start_s, abs=1e-3), "records have whole milliseconds"
    assert json.loads(plan)
    assert stream.text.endswith(f": usage {used}\n\ndata: [DONE]\n\n")


async def test_an_abandoned_stream_is_charged_for_what_was_generated(served: Served) -> None:
    await ask(served.base, "none", "a")
    stream = await ask(served.base, "none", "a", stream=True)
    while not (await anext(stream)).choices[0].delta.content:
        pass
    await stream.close()
    counts = (await until_counted(served.base, 2))["", "a"]
    assert counts.prompt_tokens == 14


async def test_requests_that_no_engine_served_are_not_metered(served: Served) -> None:
    await ask(served.base, "none", "a")
    for body in ({"model": "missing", "messages": []}, {"model": "a"}):
        assert (await served.http.post("/v1/chat/completions", json=body)).status_code in (400, 404)
    assert (await until_counted(served.base, 1))["", "a"].requests == 1


@asynccontextmanager
async def gateway_process(site: Site, home: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    kept = kept_port()
    port = kept.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("THAW_")} | {
        "THAW_NATS_URL": site.settings.nats_url.get_secret_value(),
        "THAW_GATEWAY_PORT": str(port),
        "THAW_HOME": str(home),
        "THAW_ADMIN_KEY": "root",
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.gateway", env=environment)
    base = f"http://127.0.0.1:{port}"

    async def is_ready() -> bool:
        assert process.returncode is None
        try:
            async with httpx.AsyncClient(base_url=base, timeout=60) as client:
                return (await client.get("/ready")).status_code == 200
        except httpx.TransportError:
            return False

    try:
        await until(is_ready)
        yield process, base
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        kept.close()


async def test_no_record_is_lost_or_counted_twice_when_processes_are_killed(site: Site, tmp_path: Path) -> None:
    await serving_node(site, budget=700 * MIB)
    scheduler = await scheduler_process(site, "first")
    await site.add(spec("a"))
    count = 0
    for number in range(3):
        async with gateway_process(site, tmp_path / "home") as (process, base):
            for _ in range(4):
                await ask(base, "none", "a")
                count += 1
            if number == 1:  # after a report, with another one that the scheduler may have recorded
                await until_counted(base, count)
                await ask(base, "none", "a")
                count += 1
                scheduler.kill()
                await scheduler.wait()
                scheduler = await scheduler_process(site, "second")
            process.send_signal(signal.SIGKILL)
            await process.wait()
    async with gateway_process(site, tmp_path / "home") as (_, base):
        counts = (await until_counted(base, count))["", "a"]
        assert counts.prompt_tokens == 7 * count
        assert counts.failed == 0
        await until(lambda: _is_reported(tmp_path / "home" / "gateway" / "usage"))
    scheduler.terminate()
    await scheduler.wait()


async def _is_reported(spools: Path) -> bool:
    """The gateway has one spool, and has removed what the scheduler acknowledged."""
    sizes: list[int] = []
    for spool in spools.iterdir():
        with contextlib.suppress(FileNotFoundError):  # an earlier gateway's, which is removed meanwhile
            sizes.append(spool.stat().st_size)
    return sizes == [0]


def _report(start: int, end: int, requests: int = 1, hour: int = HOUR, plan: str | None = None) -> ReportUsage:
    waits = (ColdWait(plan_id=plan, hour=hour, key="k", model="m", requests=1, start_s=8.0),) if plan is not None else ()
    rows = (UsageRow(hour=hour, key="k", model="m", counts=Counts(requests=requests)),)
    return ReportUsage(spool="s", start=start, end=end, rows=rows, waits=waits)


async def test_the_ledger_records_a_spool_in_order_and_once(migrated_url: str) -> None:
    engine = connect(migrated_url)
    try:
        await migrate(engine)
        ledger = Ledger(engine)
        async with leadership(plain_url(migrated_url)) as term:
            positions = [
                (await ledger.record(term.epoch, report, HOUR)).position
                for report in (_report(0, 10), _report(0, 10), _report(20, 30), _report(10, 20, plan="p"), _report(10, 20))
            ]
            assert positions == [10, 10, 10, 20, 20]
            (row,) = (await ledger.view(ViewUsage(since=0, by=()))).rows
            assert (row.counts.requests, row.counts.cold_start_s) == (2, 8.0)
            assert row.cost is None
            with pytest.raises(StaleEpoch):
                await ledger.record(term.epoch - 1, _report(20, 30), HOUR)
            await ledger.record(term.epoch, _report(20, 30, hour=5), HOUR)
            assert [r.hour for r in (await ledger.view(ViewUsage(since=0, by=("hour",)))).rows] == [HOUR, 5]
            await ledger.prune(term.epoch, RETENTION_HOURS + 24)
            assert [r.hour for r in (await ledger.view(ViewUsage(since=0, by=("hour",)))).rows] == [HOUR]
            until_now = await ledger.view(ViewUsage(since=0, until=HOUR, by=("key",)))
            assert until_now.rows == ()
    finally:
        await engine.dispose()


async def test_old_hours_are_summed_up_by_day(migrated_url: str) -> None:
    """Sums over days stay as they are, whenever and how often the hours are summed up."""
    rng = random.Random(7)
    days = 5
    first = HOUR // 24 * 24 - HOURLY_HOURS - days * 24
    engine = connect(migrated_url)
    try:
        await migrate(engine)
        ledger = Ledger(engine)
        async with leadership(plain_url(migrated_url)) as term:

            async def record(spool: str, hours: list[int]) -> None:
                rows = tuple(
                    UsageRow(hour=hour, key=rng.choice("kl"), model="m", counts=Counts(requests=1, prompt_tokens=rng.randint(1, 9)))
                    for hour in hours
                )
                await ledger.record(term.epoch, ReportUsage(spool=spool, start=0, end=1, rows=rows), HOUR)
                held = {(hour, "k", "m", "cpu"): rng.uniform(1, 9) for hour in hours}
                await ledger.record_held(term.epoch, [HeldBatch(spool, hours[0] * 3600.0, hours[-1] * 3600.0, held)])

            async def view(*by: Any) -> list[dict[str, Any]]:
                return sorted((r.model_dump() for r in (await ledger.view(ViewUsage(since=0, by=by))).rows), key=str)

            await record("one", list(range(first, first + days * 24)))
            for spool, last in (("two", first + 60), ("three", first + days * 24)):
                before = await view("key", "day")
                await ledger.prune(term.epoch, last + HOURLY_HOURS)
                for row, old in zip(await view("key", "day"), before, strict=True):
                    assert row["counts"] == pytest.approx(old["counts"])
                hours = {row["hour"] for row in await view("hour")}
                assert {hour for hour in hours if hour < last // 24 * 24} == set(range(first, last // 24 * 24, 24))
                assert {hour for hour in hours if hour >= last} == set(range(last, first + days * 24))
                await record(spool, list(range(first, first + 40, 7)))  # a gateway was without a scheduler
            await ledger.prune(term.epoch, HOUR)
            assert {row["hour"] for row in await view("hour")} == set(range(first, first + days * 24, 24))
    finally:
        await engine.dispose()


async def test_a_response_that_two_gateways_report_counts_once(migrated_url: str) -> None:
    def report(spool: str, *answers: str) -> ReportUsage:
        row = UsageRow(hour=HOUR, key="k", model="m", counts=Counts(requests=1, completion_tokens=5))
        wait = ColdWait(plan_id="p", hour=HOUR, key="k", model="m", requests=1, start_s=8.0, device_kind="cpu")
        responses = tuple(ResponseUsage(answer_id=answer, row=row, wait=wait) for answer in answers)
        return ReportUsage(spool=spool, start=0, end=10, rows=(row,), responses=responses)

    engine = connect(migrated_url)
    try:
        await migrate(engine)
        ledger = Ledger(engine)
        spending = Spending(ledger)
        async with leadership(plain_url(migrated_url)) as term:
            assert not (await spending.view(ViewSpending(keys=("k",)), HOUR)).keys
            for spool, answers in (("first", ("r1", "r2")), ("second", ("r2", "r3", "r3")), ("second", ("r4",))):
                await spending.record(term.epoch, report(spool, *answers), HOUR)
            counts = (await ledger.view(ViewUsage(since=0))).rows[0].counts
            assert (counts.requests, counts.completion_tokens) == (2 + 3, 25)
            assert counts.cold_start_s == pytest.approx(8.0)
            assert (await spending.view(ViewSpending(keys=("k",)), HOUR)).keys["k"].day_tokens == 25
            await ledger.prune(term.epoch, HOUR + 41 * 24)
            await ledger.record(term.epoch, report("third", "r1"), HOUR)
            assert (await ledger.view(ViewUsage(since=0))).rows[0].counts.requests == 2 + 3 + 2
    finally:
        await engine.dispose()


def _used(model: str, tokens: int, end: int, **wait: Any) -> ReportUsage:
    counts = Counts(requests=1, prompt_tokens=tokens, completion_tokens=tokens, compute_cpu_us=2 * tokens)
    rows = tuple(UsageRow(hour=HOUR, key=key, model=model, counts=counts) for key in ("k", "l"))
    waits = tuple(ColdWait(plan_id="p", hour=HOUR, key=key, model=model, requests=1, start_s=8.0, **wait) for key in ("k", "l"))
    return ReportUsage(spool=f"spool of {model}", start=0, end=end, rows=rows, waits=waits if wait else ())


async def test_sums_over_models_cost_what_each_model_costs(migrated_url: str) -> None:
    engine = connect(migrated_url)
    try:
        await migrate(engine)
        ledger = Ledger(engine, PRICES)
        async with leadership(plain_url(migrated_url)) as term:
            await ledger.record(term.epoch, _used("a", 1_000_000, 10, device_kind="cpu", devices=2), HOUR)
            await ledger.record(term.epoch, _used("b", 1_000_000, 10), HOUR)
            for by in ("key",), ("key", "hour"):
                viewed = await ledger.view(ViewUsage(since=0, by=by))
                # Prompts, answers and 2 s of computing of both, and half of 8 s on two devices.
                each = 100 + 100 + 400 + 800 + 2 * 6 + Decimal("0.5") * 8
                assert [row.cost.total for row in viewed.rows if row.cost] == [each] * 2
            assert viewed.currency == "EUR"
            (one,) = (await ledger.view(ViewUsage(since=0, model="a", by=("hour",)))).rows
            assert one.cost is not None
            assert (one.cost.compute, one.counts.compute_s) == (Decimal(12), 4.0)
            assert (one.cost.cold_starts, one.counts.cold_start_s, one.counts.prompt_tokens) == (Decimal(8), 8.0, 2_000_000)
            (total,) = (await ledger.view(ViewUsage(since=0, by=()))).rows
            assert total.cost is not None
            assert (total.cost.cold_starts, total.counts.cold_device_s, total.counts.prompt_tokens) == (Decimal(8), 16.0, 4_000_000)
            spending, keys = Spending(ledger), ViewSpending(keys=("k",))
            assert (await spending.view(keys, HOUR)).keys["k"].day_money == each
            await spending.record(term.epoch, _used("a", 1_000_000, 20).model_copy(update={"start": 10}), HOUR)
            spent = (await spending.view(keys, HOUR)).keys["k"]
            assert spent.day_money == each + 100 + 400 + 6
            assert (spent.day_device_s, spent.month_device_s) == (3 * 2 + 8, 3 * 2 + 8)
            # Without prices, cold starts are read only for budgets of device-seconds.
            free = Spending(Ledger(engine))
            assert (await free.view(keys, HOUR)).keys["k"].day_device_s == 3 * 2
            asked = keys.model_copy(update={"has_device_seconds_budget": True})
            assert (await free.view(asked, HOUR)).keys["k"].day_device_s == 3 * 2 + 8
    finally:
        await engine.dispose()


async def test_the_command_prints_json_and_csv(served: Served) -> None:
    await ask(served.base, "none", "a")
    await until_counted(served.base, 1)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("THAW_")}
    environment |= {"THAW_URL": served.base, "THAW_ADMIN_KEY": "root"}

    async def run(*arguments: str) -> str:
        command = (sys.executable, "-m", "thaw.cli.app", "usage", "--since", "2h", *arguments)
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        assert process.returncode == 0
        return out.decode()

    (row,) = json.loads(await run("--by", "model,key", "--json"))["rows"]
    assert (row["model"], row["key"], row["counts"]["requests"]) == ("a", "", 1)
    header, *lines = (await run("--by", "key,hour", "--csv")).splitlines()
    assert header.startswith("key,hour,requests,failed,prompt_tokens")
    (line,) = [found for found in lines if found.split(",")[2] != "0"]  # in the next hour there is only memory held
    assert line.startswith("(no key),")
    assert line.split(",")[2] == "1"
    titles, *_ = (await run("--by", "day", "--phases")).splitlines()
    assert titles.split()[:3] == ["DAY", "COLD", "COLD"]
    table = await run()
    assert "REQUESTS" in table
    assert "EUR" in table
    # Memory is charged every ten seconds: between two commands, or in none.
    charges = [c for c in csv.DictReader(io.StringIO(await run("--focus"))) if c["SkuId"] != "memory-gib-hours"]
    skus = ["prompt-tokens", "completion-tokens", "compute-device-seconds", "cold-start-device-seconds"]
    assert [c["SkuId"] for c in charges] == skus
    assert sum(Decimal(c["BilledCost"]) for c in charges) == Decimal(row["cost"]["total"]) - Decimal(row["cost"]["memory"])
    assert {c["ResourceId"] for c in charges} == {"a"}
