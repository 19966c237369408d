"""When the ledger is asked for what keys have spent."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from services.gateway.adapters.budget_keeper import BudgetKeeper
from services.gateway.adapters.key_store import KeyStore
from services.gateway.domain.limits.spending import Unreported
from shared.contracts.keys import ApiKey
from shared.contracts.usage import Period, SpendingViewed, ViewSpending
from shared.messaging import Mesh
from shared.tasks import end

KEY = ApiKey(name="new", created=0, tokens_per_day=100)


class Ledger:
    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    async def request(self, _: str, query: ViewSpending, __: Any) -> SpendingViewed:
        self.asked.append(query.keys)
        return SpendingViewed(period=Period.of_hour(0))


class Keys:
    def list_keys(self) -> list[ApiKey]:
        return [KEY]


async def test_request_of_a_new_key_does_not_wait_for_a_report_on_its_way() -> None:
    ledger, reporting = Ledger(), asyncio.Lock()
    keeper = BudgetKeeper(cast(Mesh, ledger), cast(KeyStore, Keys()), Unreported(), reporting)
    async with reporting:
        asking = asyncio.create_task(keeper.run())
        try:
            await asyncio.sleep(0)
            async with asyncio.timeout(60):
                await keeper.prepare(KEY)
        finally:
            await end(asking)
    assert ledger.asked == [("new",)]
