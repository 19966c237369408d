"""Usage as CSV with columns of FOCUS, the FinOps Open Cost and Usage Specification (version 1.1).

A row is a charge: one kind of consumption of one key, model and LoRA adapter in one hour, or in one
day where the ledger has summed hours up. Thaw has no invoices, discounts or tax: columns about them
are left out, and all costs are equal.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from shared.contracts.usage import HOURLY_HOURS, HOURS_PER_DAY, Dimension, UsageSum

DIMENSIONS: tuple[Dimension, ...] = ("key", "model", "adapter", "hour")
"""The dimensions that the sums must be taken by."""
COLUMNS = (
    "BilledCost",
    "BillingAccountId",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargeFrequency",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "ConsumedQuantity",
    "ConsumedUnit",
    "ContractedCost",
    "EffectiveCost",
    "ListCost",
    "PricingQuantity",
    "PricingUnit",
    "ProviderName",
    "PublisherName",
    "ResourceId",
    "ResourceName",
    "ResourceType",
    "ServiceCategory",
    "ServiceName",
    "SkuId",
    "SubAccountId",
    "SubAccountName",
)
_NO_KEY = "(no key)"


def focus_csv(rows: tuple[UsageSum, ...], currency: str, hour: int) -> str:
    """Format sums by `DIMENSIONS` that have costs. Consumption of nothing has no row.

    Args:
        hour: The present hour. The first hour of a day that the ledger has summed up by now stands
            for the day.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in sorted(rows, key=lambda r: (r.hour or 0, r.key or "", r.model or "", r.adapter or "")):
        for charge in _charges(row, hour - HOURLY_HOURS):
            writer.writerow(charge | {"BillingCurrency": currency})
    return text.getvalue()


def _charges(row: UsageSum, first_hourly: int) -> Iterator[dict[str, str]]:
    counts, cost = row.counts, row.cost
    assert cost is not None
    uncached = max(0, counts.prompt_tokens - counts.cached_tokens)
    for sku, quantity, unit, amount, description in (
        ("prompt-tokens", Decimal(uncached), "Tokens", cost.prompt, "Prompt tokens that no cache had"),
        ("cached-tokens", Decimal(counts.prompt_tokens - uncached), "Tokens", cost.cached, "Prompt tokens from a cache"),
        ("completion-tokens", Decimal(counts.completion_tokens), "Tokens", cost.completion, "Generated tokens"),
        (
            "compute-device-seconds",
            Decimal(counts.compute_cpu_us + counts.compute_cuda_us) / 1_000_000,
            "Seconds",
            cost.compute,
            "Computing, for requests and for none, in seconds of a device",
        ),
        (
            "cold-start-device-seconds",
            Decimal(counts.cold_device_s).quantize(Decimal("0.000001")),
            "Seconds",
            cost.cold_starts,
            "Share of cold starts, in seconds of a device",
        ),
        (
            "clearing-device-seconds",
            Decimal(counts.clearing_device_s).quantize(Decimal("0.000001")),
            "Seconds",
            cost.clearing,
            "Share of waiting for victims to leave, in seconds of a device",
        ),
        (
            "memory-gib-hours",
            Decimal(counts.held_gib_h + counts.parked_gib_h).quantize(Decimal("0.000001")),
            "GiB-Hours",
            cost.memory,
            "Memory held on devices and by suspended engines",
        ),
        (
            "cached-weights-gib-hours",
            Decimal(counts.cached_gib_h).quantize(Decimal("0.000001")),
            "GiB-Hours",
            cost.cache,
            "Weights in host memory that no instance used",
        ),
    ):
        if not quantity:
            continue
        price = format_exact(amount)
        model = f"{row.model}:{row.adapter}" if row.adapter else str(row.model)
        yield {
            **_periods(row.hour or 0, first_hourly),
            "BilledCost": price,
            "EffectiveCost": price,
            "ListCost": price,
            "ContractedCost": price,
            "BillingAccountId": "thaw",
            "ChargeCategory": "Usage",
            "ChargeClass": "",
            "ChargeDescription": description,
            "ChargeFrequency": "Usage-Based",
            "ConsumedQuantity": format_exact(quantity),
            "ConsumedUnit": unit,
            "PricingQuantity": format_exact(quantity / 1_000_000 if unit == "Tokens" else quantity),
            "PricingUnit": "1000000 Tokens" if unit == "Tokens" else unit,
            "ProviderName": "Thaw",
            "PublisherName": "Thaw",
            "ResourceId": model,
            "ResourceName": model,
            "ResourceType": "Model",
            "ServiceCategory": "AI and Machine Learning",
            "ServiceName": "Thaw",
            "SkuId": sku,
            "SubAccountId": row.key or _NO_KEY,
            "SubAccountName": row.key or _NO_KEY,
        }


def _periods(hour: int, first_hourly: int) -> dict[str, str]:
    start = datetime.fromtimestamp(hour * 3600, UTC)
    hours = HOURS_PER_DAY if hour % HOURS_PER_DAY == 0 and hour + HOURS_PER_DAY <= first_hourly else 1
    month = start.replace(day=1, hour=0)
    return {
        "ChargePeriodStart": _time(start),
        "ChargePeriodEnd": _time(start + timedelta(hours=hours)),
        "BillingPeriodStart": _time(month),
        "BillingPeriodEnd": _time((month + timedelta(days=32)).replace(day=1)),
    }


def _time(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def format_exact(amount: Decimal) -> str:
    """Format an amount exactly, without an exponent or trailing zeros."""
    text = f"{amount:f}"
    return text.rstrip("0").rstrip(".") or "0" if "." in text else text
