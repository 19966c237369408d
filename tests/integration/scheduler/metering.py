"""Requests of API keys, and the ledger's sums of them."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import Any

import httpx
import openai

from shared.contracts.prices import Prices, TokenPrices
from shared.contracts.usage import Counts, UsageViewed
from tests.integration.gateway.api_keys import ADMIN

HOUR = int(time.time() // 3600)
PRICES = Prices(
    currency="EUR",
    tokens=TokenPrices(prompt=Decimal(100), completion=Decimal(400)),
    compute_seconds={"cpu": Decimal(3)},
    device_seconds={"cpu": Decimal("0.5")},
    models={"b": TokenPrices(completion=Decimal(800))},
)


async def ask(base: str, key: str, model: str, **fields: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key, max_retries=4, timeout=60) as client:
        return await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hi"}], **fields)


async def usage(base: str, by: str = "key,model") -> dict[tuple[str, ...], Counts]:
    async with httpx.AsyncClient(base_url=base, timeout=60) as client:
        answer = await client.get("/admin/v1/usage", params={"by": by, "since": str(HOUR - 1)}, headers=ADMIN)
    if answer.status_code == 503:
        return {}
    assert answer.status_code == 200, answer.text
    rows = [row for row in UsageViewed.model_validate(answer.json()).rows if row.counts.requests]  # others are of memory held
    return {tuple(str(getattr(row, name)) for name in by.split(",")): row.counts for row in rows}
