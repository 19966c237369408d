"""A key over its budget is refused on every gateway, by what the ledger and each gateway know."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
import pytest

from shared.contracts.usage import Period
from tests.integration.gateway.api_keys import ADMIN, add_key
from tests.integration.gateway.conftest import Served, until
from tests.integration.scheduler.conftest import Site, spec
from tests.integration.scheduler.metering import PRICES, ask
from tests.integration.scheduler.serving import gateway, serving_node
from tests.support.fake_node import MIB

_HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock of gateways and schedulers begin at noon: no day ends during a test."""
    real, offset_s = time.time, 12 * _HOUR_S - time.time() % (24 * _HOUR_S)
    monkeypatch.setattr(time, "time", lambda: real() + offset_s)


async def status_of(served: Served, key: str) -> int:
    try:
        await ask(served.base, key, "a")
    except openai.APIStatusError as e:
        return e.status_code
    return 200


async def spend(served: Served, key: str, *, limit: int = 50) -> tuple[int, openai.RateLimitError]:
    """Send requests until one is refused; return the tokens of the others and the error."""
    used = 0
    for _ in range(limit):
        try:
            used += (await ask(served.base, key, "a")).usage.total_tokens
        except openai.RateLimitError as e:
            return used, e
    raise AssertionError("no request was refused")


async def spending(served: Served) -> dict[str, Any]:
    """Return what the key has used by the list of keys."""
    found: dict[str, Any] = (await served.http.get("/admin/v1/keys", headers=ADMIN)).json()["spending"]["team"]
    return found


async def change(served: Served, name: str, **fields: Any) -> None:
    answer = await served.http.patch(f"/admin/v1/keys/{name}", json=fields, headers=ADMIN)
    assert answer.status_code == 200, answer.text


async def test_a_budget_holds_on_all_gateways_and_ends_with_its_period(site: Site, tmp_path: Path) -> None:
    await serving_node(site, budget=700 * MIB)
    site.scheduler(prices=PRICES.model_dump_json())
    await site.add(spec("a"))
    async with (
        gateway(site, admin_key="root", home=tmp_path / "one") as one,
        gateway(site, admin_key="root", home=tmp_path / "two") as two,
    ):
        size = (await ask(one.base, "none", "a")).usage.total_tokens
        await add_key(one, "team", "sk-team", tokens_per_day=3 * size + 1)
        await until(lambda: _is_known(two, "sk-team"))
        used, error = await spend(one, "sk-team")
        assert 3 * size <= used <= 4 * size  # another one was sent to the other gateway, maybe too late to be known here
        assert (error.code, error.type) == ("insufficient_quota", "insufficient_quota")
        assert 'thaw_requests_rejected_total{thaw_key="team",thaw_reason="budget"} 1.0' in (await one.http.get("/metrics")).text
        assert "budget of" in error.message
        assert f"{3 * size + 1} tokens per day" in error.message
        assert error.response.headers["x-should-retry"] == "false"
        await until(lambda: _is_refused(two, "sk-team"))
        await until(lambda: _agree(one, two, used + size))
        await change(one, "team", tokens_per_day=1000 * size)
        await until(lambda: _is_known(two, "sk-team"))

        # What both used costs money at once, and the message names the currency.
        await change(one, "team", tokens_per_day=None, money_per_month="0.000001")
        await until(lambda: _has_budget(two, "money_per_month"))
        _, error = await spend(two, "sk-team")
        assert "0.000001 EUR per month" in error.message
        month = Period.of_hour(int(time.time() // _HOUR_S)).month_end
        assert f"The month ends at {_day_of(month)}" in error.message

        # Each request of the fake engine takes a quarter of a device-second.
        await change(one, "team", money_per_month=None, device_seconds_per_day=1000)
        await until(lambda: _is_known(two, "sk-team"))
        await until(lambda: _has_device_seconds(one, two, size))
        used_s = (await spending(two))["day_device_s"]
        await change(one, "team", device_seconds_per_day=used_s + 0.3)
        # The third request is refused only by a gateway that has received the new budget.
        await until(lambda: _has_budget(two, "device_seconds_per_day", used_s + 0.3))
        _, error = await spend(two, "sk-team")
        assert f"budget of {used_s + 0.3:.12g} device-seconds per day" in error.message
        assert error.code == "insufficient_quota"
        assert used_s + 0.5 == (await spending(two))["day_device_s"]


def _day_of(hour: int) -> str:
    return datetime.fromtimestamp(hour * _HOUR_S, UTC).strftime("%Y-%m-%dT00:00:00Z")


async def _agree(one: Served, two: Served, least: int) -> bool:
    """Both gateways show the same usage, of at least so many tokens."""
    shown = [(await spending(served))["day_tokens"] for served in (one, two)]
    return bool(shown[0] == shown[1] >= least)


async def _has_device_seconds(one: Served, two: Served, size: int) -> bool:
    """Both gateways show the same usage, of a quarter of a device-second for each request."""
    shown = [await spending(served) for served in (one, two)]
    return all(s["day_device_s"] == s["day_tokens"] / size / 4 for s in shown) and shown[0] == shown[1]


async def _has_budget(served: Served, field: str, amount: float | None = None) -> bool:
    """The gateway has received the key with this budget, or any."""
    (key,) = [k for k in (await served.http.get("/admin/v1/keys", headers=ADMIN)).json()["keys"] if k["name"] == "team"]
    return key[field] is not None if amount is None else bool(key[field] == amount)


async def _is_known(served: Served, key: str) -> bool:
    return await status_of(served, key) == 200


async def _is_refused(served: Served, key: str) -> bool:
    return await status_of(served, key) == 429


async def test_budgets_do_not_need_a_scheduler(site: Site, tmp_path: Path) -> None:
    await serving_node(site, budget=700 * MIB)
    task = site.scheduler()
    await site.add(spec("a"))
    async with gateway(site, admin_key="root", home=tmp_path / "one") as one:
        size = (await ask(one.base, "none", "a")).usage.total_tokens
        for stop, _ in site.schedulers:
            stop.set()
        await task
        await add_key(one, "team", "sk-team", tokens_per_day=2 * size)
        used, error = await spend(one, "sk-team")
        assert used == 2 * size
        assert error.code == "insufficient_quota"
        site.scheduler()
        assert await status_of(one, "sk-team") == 429
