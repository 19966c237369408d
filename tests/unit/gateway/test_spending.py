"""Budgets: what requests used counts until the ledger's sums have it, and no longer."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.gateway.domain.limits.spending import ComputeRates, Exhausted, Unreported, Used, find_exhausted
from shared.contracts.keys import KeyLimits
from shared.contracts.usage import Period, Spent
from tests.support.examples import examples

HOUR = 494_519  # 2026-05-31T23:00Z
PERIOD = Period.of_hour(HOUR)


def test_periods_are_days_and_calendar_months_in_utc() -> None:
    assert (PERIOD.day_end, PERIOD.month_end) == (HOUR + 1, HOUR + 1)
    assert (PERIOD.day, PERIOD.month) == (HOUR - 23, HOUR - 31 * 24 + 1)
    assert Period.of_hour(HOUR + 1).month == HOUR + 1


def exhausted(
    limits: dict[str, Any], spent: Spent, unreported: Used | None = None, reserved: Used | None = None
) -> Exhausted | None:
    return find_exhausted(KeyLimits.model_validate(limits), spent, unreported or Used(), reserved or Used(), PERIOD)


@pytest.mark.parametrize(
    ("limits", "spent", "found"),
    [
        ({}, Spent(day_tokens=10**12), None),
        ({"tokens_per_day": 100}, Spent(day_tokens=99, month_tokens=5000), None),
        ({"tokens_per_day": 100}, Spent(day_tokens=100), ("100", "tokens", "day")),
        ({"tokens_per_day": 100, "tokens_per_month": 500}, Spent(day_tokens=100, month_tokens=500), ("500", "tokens", "month")),
        ({"device_seconds_per_day": 3600}, Spent(day_device_s=3599.9, month_device_s=9e9), None),
        ({"device_seconds_per_day": 3600}, Spent(day_device_s=3600), ("3600", "device-seconds", "day")),
        ({"device_seconds_per_month": 0.5, "tokens_per_day": 1}, Spent(month_device_s=0.5), ("0.5", "device-seconds", "month")),
        ({"money_per_day": "0.5"}, Spent(day_money=Decimal("0.499999")), None),
        ({"money_per_day": "0.5"}, Spent(day_money=Decimal("0.5")), ("0.5", None, "day")),
        ({"money_per_month": 2}, Spent(month_money=Decimal("2.1")), ("2", None, "month")),
    ],
)
def test_a_budget_that_is_used_refuses(limits: dict[str, Any], spent: Spent, found: tuple[str, str | None, str] | None) -> None:
    answer = exhausted(limits, spent)
    assert (None if answer is None else (answer.budget, answer.unit, answer.period)) == found
    assert answer is None or not answer.is_reserved


def test_own_usage_uses_the_budget_and_active_requests_only_reserve_it() -> None:
    limits, spent = {"tokens_per_day": 100, "money_per_month": 1}, Spent(day_tokens=60)
    assert exhausted(limits, spent, Used(30), Used(9)) is None
    reserved = exhausted(limits, spent, Used(30), Used(10))
    assert reserved is not None
    assert reserved.is_reserved
    used = exhausted(limits, spent, Used(30, Decimal(1)), Used(10))
    assert used is not None
    assert (used.budget, used.is_reserved) == ("1", False)


def test_active_requests_reserve_the_device_seconds_that_recent_ones_of_their_model_took() -> None:
    rates, limits = ComputeRates(), {"device_seconds_per_day": 10}
    assert rates.estimate("m", 1000) == 0
    for tokens, device_s in ((100, 2.0), (0, 5.0), (50, 1.0)):
        rates.add("m", tokens, device_s)
    assert rates.estimate("m", 100) == pytest.approx(2)
    assert rates.estimate("other", 100) == 0
    rates.add("m", 100, 10.0)
    assert rates.estimate("m", 100) == pytest.approx(3)
    reserved = Used(device_s=rates.estimate("m", 100))
    assert exhausted(limits, Spent(day_device_s=6), Used(device_s=0.9), reserved) is None
    found = exhausted(limits, Spent(day_device_s=6), Used(device_s=1.1), reserved)
    assert found is not None
    assert (found.unit, found.is_reserved) == ("device-seconds", True)
    used = exhausted(limits, Spent(day_device_s=6), Used(device_s=4), reserved)
    assert used is not None
    assert not used.is_reserved


@pytest.mark.parametrize(
    "bad",
    [
        {"device_seconds_per_day": 0},
        {"device_seconds_per_month": "inf"},
        {"tokens_per_day": 0},
        {"money_per_month": -1},
        {"money_per_day": "0.0000001"},
    ],
)
def test_wrong_budgets_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        KeyLimits.model_validate(bad)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.sampled_from(["use", "use", "cut", "report", "lose the reply", "confirm", "ask", "sum", "answer", "lose the answer"]),
        max_size=60,
    )
)
def test_a_gateway_never_counts_its_own_requests_too_little(events: list[str]) -> None:
    """The spool, the ledger and the gateway, with messages lost and in any order."""
    unreported, spool, ledger, confirmed = Unreported(), 0, 0, 0
    known, in_answer, is_asking, sent = 0, None, False, 0
    for event in events:
        match event:
            case "use":
                unreported.add("k", 1, Decimal(2), 0.25)
                spool += 1
            case "cut":
                unreported.cut(spool)
                sent = spool
            case "report":
                ledger = max(ledger, sent)
                confirmed = ledger
            case "lose the reply":
                ledger = max(ledger, sent)
            case "confirm":
                unreported.confirm(confirmed)
            case "ask":
                unreported.begin_ask()
                is_asking, in_answer = True, None
            case "sum":
                in_answer = ledger if is_asking else None
            case "answer" if in_answer is not None:
                known, in_answer, is_asking = max(known, in_answer), None, False
                unreported.on_answer()
            case "lose the answer":
                in_answer, is_asking = None, False
        counted = unreported.total("k")
        assert known + counted.tokens >= spool
        assert counted.money == 2 * Decimal(counted.tokens)
        assert counted.device_s == counted.tokens / 4
    unreported.cut(spool)
    unreported.confirm(spool)
    unreported.begin_ask()
    unreported.on_answer()
    assert unreported.total("k") == Used()
