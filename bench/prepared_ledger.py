"""A ledger that takes every report and knows prices: `python -m bench.prepared_ledger --nats URL`.

It stands for the scheduler where a benchmark measures the gateway. Of no key anything was spent.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from decimal import Decimal

import nats
from pydantic import TypeAdapter

from shared.contracts import subjects
from shared.contracts.base import Message
from shared.contracts.prices import Prices, TokenPrices
from shared.contracts.usage import Period, ReportUsage, SpendingViewed, UsageRecorded, ViewSpending

_ASKED: TypeAdapter[ReportUsage | ViewSpending] = TypeAdapter(ReportUsage | ViewSpending)
_PRICES = Prices(
    currency="EUR",
    tokens=TokenPrices(prompt=Decimal("0.1"), cached=Decimal("0.02"), completion=Decimal("0.4")),
    compute_seconds={"cpu": Decimal("0.00003")},
)


def answer(asked: ReportUsage | ViewSpending) -> Message:
    """Return what the ledger replies."""
    if isinstance(asked, ReportUsage):
        return UsageRecorded(position=asked.end)
    return SpendingViewed(period=Period.of_hour(int(time.time()) // 3600), prices=_PRICES)


async def serve(nats_url: str) -> None:
    """Reply until the process is ended."""
    client = await nats.connect(nats_url)
    async for message in (await client.subscribe(subjects.USAGE)).messages:
        await message.respond(answer(_ASKED.validate_json(message.data)).model_dump_json().encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", required=True)
    asyncio.run(serve(parser.parse_args().nats))


if __name__ == "__main__":
    main()
