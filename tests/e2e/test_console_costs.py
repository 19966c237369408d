"""Costs, budgets, settings and latencies over time in the console, in a real browser."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import openai
import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from services.gateway.authorization import hash_key
from shared.contracts.latencies import BINS_PER_DOUBLING
from shared.contracts.usage import Period
from tests.support.browser import log_in, needs_chromium, opened, serious_findings
from tests.support.launcher import Thaw, until
from thaw.config import load_config
from thaw.demo.models import make_demo_model

pytestmark = needs_chromium
TOKENS = {"prompt": 1000, "completion": 500_000}
PRICES = json.dumps({"currency": "EUR", "tokens": TOKENS, "compute_seconds": {"cpu": 50}, "device_seconds": {"cpu": 2}})
KEY = "sk-thaw-spender"
VIEWER = "sk-thaw-viewer"
HALF_A_BIN = 2 ** (0.5 / BINS_PER_DOUBLING) - 1
"""Largest relative difference between a time and the middle of its bin."""
PHASE_ROUNDING_MS = 0.0005
"""Gateways round the middle of a phase's bin to 0.001 ms; the page then rounds what it prints."""


@pytest.fixture(scope="module")
def spent(mesh: Thaw) -> dict[str, Any]:
    """Return the ledger's sums after a key with budgets has used a model."""
    headers = {"authorization": f"Bearer {mesh.endpoints['admin_key']}"}
    budgets = {"tokens_per_day": 1000, "device_seconds_per_day": 3600, "money_per_month": "50"}
    with httpx.Client(base_url=f"{mesh.url}/admin/v1", headers=headers, timeout=120) as admin:
        admin.post("/keys", json={"name": "spender", "sha256": hash_key(KEY), **budgets}).raise_for_status()
        viewer = {"name": "viewer", "scope": "read-only", "sha256": hash_key(VIEWER)}
        admin.post("/keys", json=viewer).raise_for_status()
        with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key=KEY, timeout=120, max_retries=2) as client:
            client.chat.completions.create(model="one", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
        found: dict[str, Any] = {}

        def recorded() -> bool:
            found.update(admin.get("/usage", params={"since": 0, "by": "key,model"}).json())
            return any(row["counts"]["requests"] for row in found["rows"])

        until(recorded, what="the request is in the ledger")

        def followed() -> bool:
            spending = admin.get("/keys").json()["spending"]["spender"]
            return bool(Decimal(spending["month_money"]) == used_by_key(admin, present().month).money)

        until(followed, what="the gateway has read what the key has spent")
    return found


@pytest.fixture
def page(browser: Browser, mesh: Thaw, spent: dict[str, Any]) -> Iterator[Page]:
    """A page of a read-only key; no script on it may fail."""
    with opened(browser) as (page, faults):
        log_in(page, mesh.url, VIEWER)
        yield page
        assert faults == []


@dataclass(frozen=True)
class Used:
    """Usage of the key in the ledger."""

    tokens: int
    device_s: float
    money: Decimal


def present() -> Period:
    return Period.of_hour(int(time.time() // 3600))


def used_by_key(admin: httpx.Client, since: int) -> Used:
    """Return what the key has used since an hour."""
    rows = admin.get("/usage", params={"since": since, "by": "key"}).json()["rows"]
    own = [(row["counts"], row["cost"]) for row in rows if row["key"] == "spender"]
    return Used(
        sum(counts["prompt_tokens"] + counts["completion_tokens"] for counts, _ in own),
        sum((counts["compute_cpu_us"] + counts["compute_cuda_us"]) / 1e6 + counts["cold_device_s"] for counts, _ in own),
        sum((Decimal(cost["total"]) for _, cost in own), Decimal(0)),
    )


def amount(text: str) -> Decimal:
    found = re.fullmatch(r"([\d,.]+)( EUR)?", text)
    assert found is not None, text
    return Decimal(found[1].replace(",", ""))


def test_usage_shows_costs_of_the_ledger_and_budgets_with_what_is_spent(
    page: Page, spent: dict[str, Any], admin: httpx.Client
) -> None:
    # A day or a month that ends meanwhile (UTC) leaves nothing spent of its budgets.
    periods = [present()]
    page.get_by_role("link", name="Usage").click()
    # Other rows are of memory that models without an owner hold.
    row = page.get_by_role("region", name="Table of usage").get_by_role("row", name=re.compile("^spender"))
    expect(row).to_have_count(1)
    cost = spent["rows"][0]["cost"]
    expect(page.get_by_role("columnheader", name="EUR in all")).to_be_visible()
    tokens, compute, cold, clearing, memory, total = (amount(cell) for cell in row.locator("td").all_inner_texts()[-6:])
    shown = Decimal("0.01")
    assert abs(total - Decimal(cost["total"])) <= shown
    assert abs(cold - Decimal(cost["cold_starts"])) <= shown
    assert abs(compute - Decimal(cost["compute"])) <= shown
    assert abs(tokens - sum(Decimal(cost[name]) for name in ("prompt", "cached", "completion"))) <= shown
    assert min(cold, compute, tokens) > 0
    assert memory == 0, "the model has no owner"
    assert clearing == 0, "nothing left for it"
    whole = page.get_by_text("Cost at the present prices:").inner_text().removeprefix("Cost at the present prices: ")
    totals = page.get_by_role("region", name="Table of usage").locator("tbody tr td:last-child").all_inner_texts()
    assert abs(amount(whole) - sum(map(amount, totals))) <= shown * len(totals)
    budgets = page.get_by_role("region", name="Budgets of keys")
    by_tokens = budgets.get_by_role("row", name=re.compile("spender tokens of a day")).locator("td").all_inner_texts()
    by_time = budgets.get_by_role("row", name=re.compile("spender device-seconds of a day")).locator("td").all_inner_texts()
    by_money = budgets.get_by_role("row", name=re.compile("spender money of a month"))
    periods.append(present())
    days = [used_by_key(admin, period.day) for period in periods]
    months = [used_by_key(admin, period.month) for period in periods]
    assert by_tokens[1:3] in [[f"{day.tokens:,}", "1,000"] for day in days]
    assert by_time[2] == "3,600 s"
    assert float(by_time[1].removesuffix(" s")) in [pytest.approx(day.device_s, abs=0.06) for day in days]
    assert any(abs(amount(by_money.locator("td").nth(1).inner_text()) - month.money) <= shown for month in months)
    assert amount(by_money.locator("td").nth(2).inner_text()) == 50
    share = by_money.get_by_role("meter", name="spender, money of a month")
    assert float(share.get_attribute("value") or 0) in [pytest.approx(float(month.money)) for month in months]
    assert serious_findings(page) == []


def test_costs_of_24_hours_are_those_of_the_present_hour_and_23_before_it(page: Page) -> None:
    def cost_the_first_hour(route: Route) -> None:
        """Answer with the first hour that is asked for as the model's cost."""
        query = parse_qs(urlsplit(route.request.url).query)
        response = route.fetch()
        viewed = response.json()
        for row in viewed["rows"]:
            is_counted = row["model"] == "one" and (query["by"] == ["model"] or row["key"] == "spender")
            row["cost"]["total"] = query["since"][0] if is_counted else "0"
        route.fulfill(response=response, json=viewed)

    page.route("**/admin/v1/usage?*", cost_the_first_hour)
    hours = [int(time.time() // 3600)]
    page.get_by_role("link", name="Models").click()
    row = page.get_by_role("row").filter(has=page.get_by_role("button", name="one", exact=True))
    shown = [row.locator("td").filter(has_text="EUR").inner_text()]
    page.get_by_role("link", name="Usage").click()
    shown.append(page.get_by_text("Cost at the present prices:").locator("b").inner_text())
    hours.append(int(time.time() // 3600))
    firsts = [amount(text) + 23 for text in shown]
    assert set(firsts) <= set(range(hours[0], hours[1] + 1)), shown
    page.unroute_all(behavior="wait")


def test_models_show_their_cost_and_their_settings_as_yaml(
    page: Page, mesh: Thaw, spent: dict[str, Any], admin: httpx.Client, tmp_path: Path
) -> None:
    page.get_by_role("link", name="Models").click()
    row = page.get_by_role("row").filter(has=page.get_by_role("button", name="one", exact=True))
    expect(page.get_by_role("columnheader", name="Cost of 24 h")).to_be_visible()
    text = row.locator("td").filter(has_text="EUR").inner_text()
    # What the model computed for no request is no key's, and arrives later.
    now = admin.get("/usage", params={"since": 0, "by": "model", "model": "one"}).json()["rows"][0]["cost"]["total"]
    assert Decimal(spent["rows"][0]["cost"]["total"]) - Decimal("0.01") <= amount(text) <= Decimal(now) + Decimal("0.01")
    row.get_by_role("button", name="one", exact=True).click()
    page.get_by_text("Settings as YAML").focus()
    page.keyboard.press("Enter")
    yaml = page.get_by_role("region", name="Settings of one as YAML").inner_text()
    path = tmp_path / "thaw.yaml"
    path.write_text(yaml)
    spec = load_config(path).models[0]
    cards = {m["card"]["spec"]["name"]: m["card"]["spec"] for m in mesh.cluster()["models"]}
    assert spec.model_dump(mode="json") == cards["one"]
    assert spec.keep_alive == -1
    assert serious_findings(page) == []


def test_models_show_objectives_latencies_phases_and_costs_over_time(
    page: Page, mesh: Thaw, spent: dict[str, Any], admin: httpx.Client, tmp_path: Path
) -> None:
    model = "judged"
    source = str(make_demo_model(tmp_path / "judged", "test", seed=7))
    spec = {"name": model, "source": source, "slo": {"ttft": 0.001}}
    admin.post("/models", json={"specs": [spec]}).raise_for_status()
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key=KEY, timeout=120, max_retries=2) as client:
        for _ in range(3):
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
    until(lambda: sum(t["model"] == model for t in admin.get("/traces").json()["traces"]) == 3, what="the traces of three requests")
    traces = [t for t in admin.get("/traces").json()["traces"] if t["model"] == model]
    until(lambda: used_by(admin, model)[0] == 3, what="the three requests are in the ledger")
    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name=model, exact=True).click()
    history = page.get_by_role("region", name=f"The last hour of {model}")
    table = history.get_by_role("region", name="Table of the last hour")
    hour = table.get_by_role("row", name=re.compile("^the hour")).locator("td")
    met = sum(t["ttft_ms"] <= 1.0 for t in traces)
    warm = sorted(t["ttft_ms"] for t in traces if not t["cold"])
    (cold,) = (t["ttft_ms"] for t in traces if t["cold"])
    expect(hour).to_have_count(7)
    shown = hour.all_inner_texts()
    assert (shown[0], shown[1], shown[4]) == (f"{met} of 3", "1", "2")
    for text, expected in zip((*shown[2:4], *shown[5:]), (cold, cold, *warm), strict=True):
        printed, rounding = milliseconds(text)
        assert printed == pytest.approx(expected, rel=0, abs=HALF_A_BIN * expected + rounding)
    for chart in ("Objective met", "Times to the first token", "Phases of the time to the first token", "Cost by hour"):
        expect(history.get_by_role("region", name=chart).locator("canvas")).to_be_visible()
    # The ledger grows meanwhile: what the model computed for no request arrives later.
    least = used_by(admin, model)[1]

    def shows_the_cost() -> bool:
        shown, rounding = cost_shown(history)
        return least - rounding <= shown <= used_by(admin, model)[1] + rounding

    until(shows_the_cost, what="the page shows the cost of the ledger")
    by_phase = history.get_by_role("region", name="Table of phases")
    shown_phases = [row.locator("th, td").all_inner_texts() for row in by_phase.locator("tbody tr").all()]
    for start, found in (("cold", [t for t in traces if t["cold"]]), ("warm", [t for t in traces if not t["cold"]])):
        expected_ms = phases_of(found)
        rows = {row[0]: row[2:] for row in shown_phases if row[1] == start}
        assert {phase: int(row[0]) for phase, row in rows.items()} == {phase: len(ms) for phase, ms in expected_ms.items()}
        for phase, row in rows.items():
            for text, expected in zip(row[1:3], (expected_ms[phase][0], expected_ms[phase][-1]), strict=True):
                printed, rounding = milliseconds(text)
                most = HALF_A_BIN * expected + PHASE_ROUNDING_MS + rounding
                assert printed == pytest.approx(expected, rel=0, abs=most), (start, phase)
    over_time = history.get_by_role("region", name="Phases of the time to the first token")
    for of in ("cold starts, p99", "cold starts, mean", "warm requests, p50", "warm requests, p99"):
        over_time.get_by_role("combobox").select_option(label=of)
        expect(over_time.get_by_role("img", name=re.compile(f"^Phases of {of}"))).to_be_visible()
        kind = "cold" if of.startswith("cold") else "warm"
        legend = over_time.locator(".u-series .u-label")
        expect(legend).to_have_count(1 + min(8, sum(row[1] == kind for row in shown_phases)))
    history.get_by_label("A point for each").select_option("1")
    expect(table.get_by_role("row", name=re.compile("^the hour"))).to_contain_text(f"{met} of 3")
    assert serious_findings(page) == []


def phases_of(traces: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return each request's milliseconds of each phase of its critical path, ascending."""
    found: dict[str, list[float]] = {}
    for trace in traces:
        sums: dict[str, float] = {}
        for segment in trace["critical_path"]:
            sums[segment["phase"]] = sums.get(segment["phase"], 0.0) + segment["duration_ms"]
        for phase, ms in sums.items():
            found.setdefault(phase, []).append(ms)
    return {phase: sorted(ms) for phase, ms in found.items()}


def used_by(admin: httpx.Client, model: str) -> tuple[int, Decimal]:
    """Return the requests of a model in the ledger, and their cost."""
    rows = admin.get("/usage", params={"since": 0, "by": "model", "model": model}).json()["rows"]
    return sum(row["counts"]["requests"] for row in rows), sum((Decimal(row["cost"]["total"]) for row in rows), Decimal(0))


def cost_shown(history: Locator) -> tuple[Decimal, Decimal]:
    """Return the sum of a page's costs by hour, and the most that rounding changes it."""
    label = history.get_by_role("img", name=re.compile("^Cost by hour")).get_attribute("aria-label") or ""
    amounts = [amount(text.strip(",")) for text in re.findall(r"[\d.,]+(?= EUR|,)", label)]
    # Each is rounded to half a unit of its last digit.
    rounding = sum((Decimal((0, (5,), int(printed.as_tuple().exponent) - 1)) for printed in amounts if printed), Decimal(0))
    return sum(amounts, Decimal(0)), rounding


def milliseconds(text: str) -> tuple[float, float]:
    """Return a printed duration in milliseconds, and half a unit of its last digit."""
    value, unit = text.split(" ", 1)
    scale = {"ms": 1.0, "s": 1e3}[unit]
    return float(value.removeprefix("<")) * scale, 0.5 * scale / 10 ** len(value.partition(".")[2])
