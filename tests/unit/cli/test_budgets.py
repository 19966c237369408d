"""Budgets of money on the command line: `--budget-day-money` and `--budget-month-money`."""

from __future__ import annotations

from decimal import Decimal

import pytest
from typer.testing import CliRunner

from shared.contracts.keys import ApiKey, KeySpending
from thaw.cli import keys
from thaw.cli.app import app
from thaw.errors import CommandError

MALFORMED = ["", "ten", "-1", "nan", "inf", "-inf", "1e-7", "0.0000001", "1,50", "5 EUR", "0x10"]


@pytest.mark.parametrize("option", ["--budget-day-money", "--budget-month-money"])
@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_amount_is_refused_with_its_option(option: str, text: str) -> None:
    day, month = (text, None) if "day" in option else (None, text)
    with pytest.raises(CommandError) as refused:
        keys._budgets(None, None, day, month)
    assert f"{option} {text!r}" in str(refused.value)


@pytest.mark.parametrize(("text", "amount"), [("25", "25"), ("0.50", "0.50"), ("1e3", "1000"), ("0.000001", "0.000001")])
def test_an_amount_is_taken_exactly(text: str, amount: str) -> None:
    assert keys._budgets(None, None, text, text) == {"money_per_day": Decimal(amount), "money_per_month": Decimal(amount)}


def test_zero_removes_a_budget() -> None:
    assert keys._budgets(0, None, "0", None) == {"tokens_per_day": None, "money_per_day": None}


def test_device_seconds_are_given_and_removed() -> None:
    assert keys._device_seconds(0.5, 0) == {"device_seconds_per_day": 0.5, "device_seconds_per_month": None}
    assert keys._device_seconds(None, None) == {}
    key = ApiKey(name="k", created=0, device_seconds_per_day=3600, device_seconds_per_month=0.5)
    described = keys._describe_budgets(key, KeySpending(day_device_s=12.34, month_device_s=99))
    assert described == "12.3 of 3600 device-seconds/day, 99.0 of 0.5 device-seconds/month"


@pytest.mark.parametrize("verb", ["add", "change"])
def test_the_command_reports_a_malformed_amount_before_it_asks_the_mesh(verb: str) -> None:
    result = CliRunner().invoke(app, ["keys", verb, "k", "--budget-day-money", "ten"])
    assert result.exit_code != 0
    assert "--budget-day-money 'ten' is no amount of money" in f"{result.output} {result.exception}"
