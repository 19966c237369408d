"""Charges in the columns of FOCUS."""

from __future__ import annotations

import csv
import io
from decimal import Decimal

from shared.contracts.prices import Cost
from shared.contracts.usage import HOURLY_HOURS, Counts, UsageSum
from thaw.cli.focus import COLUMNS, focus_csv

HOUR = 494_519
"""2026-05-31T23:00Z."""


def _charges(*rows: UsageSum, now: int = HOUR) -> list[dict[str, str]]:
    text = focus_csv(rows, "EUR", now)
    assert text.splitlines()[0].split(",") == list(COLUMNS)
    return list(csv.DictReader(io.StringIO(text)))


def test_each_kind_of_consumption_is_a_charge_of_its_own() -> None:
    counts = Counts(
        requests=2,
        prompt_tokens=1_000_000,
        cached_tokens=400_000,
        completion_tokens=10,
        cold_device_s=2.5,
        clearing_device_s=1.25,
        compute_cpu_us=1_500_000,
    )
    cost = Cost(
        prompt=Decimal("0.06"),
        cached=Decimal("0.008"),
        completion=Decimal("4E-6"),
        compute=Decimal("0.03"),
        cold_starts=Decimal("0.002"),
        clearing=Decimal("0.001"),
        total=Decimal("0.101004"),
    )
    charges = _charges(UsageSum(key="alice", model="m", adapter="sql", hour=HOUR, counts=counts, cost=cost))
    assert [(c["SkuId"], c["BilledCost"], c["ConsumedQuantity"], c["ConsumedUnit"], c["PricingQuantity"]) for c in charges] == [
        ("prompt-tokens", "0.06", "600000", "Tokens", "0.6"),
        ("cached-tokens", "0.008", "400000", "Tokens", "0.4"),
        ("completion-tokens", "0.000004", "10", "Tokens", "0.00001"),
        ("compute-device-seconds", "0.03", "1.5", "Seconds", "1.5"),
        ("cold-start-device-seconds", "0.002", "2.5", "Seconds", "2.5"),
        ("clearing-device-seconds", "0.001", "1.25", "Seconds", "1.25"),
    ]
    assert sum(Decimal(c["BilledCost"]) for c in charges) == cost.total
    first = charges[0]
    assert (first["SubAccountId"], first["ResourceId"], first["BillingCurrency"]) == ("alice", "m:sql", "EUR")
    assert (first["ChargePeriodStart"], first["ChargePeriodEnd"]) == ("2026-05-31T23:00:00Z", "2026-06-01T00:00:00Z")
    assert (first["BillingPeriodStart"], first["BillingPeriodEnd"]) == ("2026-05-01T00:00:00Z", "2026-06-01T00:00:00Z")


def test_requests_without_a_key_have_an_account_and_consumption_of_nothing_no_row() -> None:
    (charge,) = _charges(UsageSum(key="", model="m", adapter="", hour=HOUR, counts=Counts(prompt_tokens=1), cost=Cost()))
    assert (charge["SubAccountId"], charge["ResourceId"], charge["BilledCost"]) == ("(no key)", "m", "0")


def test_hours_that_the_ledger_has_summed_up_are_charged_by_day() -> None:
    first = HOUR // 24 * 24
    rows = [
        UsageSum(key="", model="m", adapter="", hour=h, counts=Counts(prompt_tokens=1), cost=Cost())
        for h in (first, first + 24, HOUR)
    ]
    charges = _charges(*rows, now=first + HOURLY_HOURS + 24)
    assert [(c["ChargePeriodStart"], c["ChargePeriodEnd"]) for c in charges] == [
        ("2026-05-31T00:00:00Z", "2026-06-01T00:00:00Z"),
        ("2026-05-31T23:00:00Z", "2026-06-01T00:00:00Z"),  # starts are kept one by one
        ("2026-06-01T00:00:00Z", "2026-06-01T01:00:00Z"),
    ]
