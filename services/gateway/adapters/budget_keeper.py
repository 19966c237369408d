"""Budgets of API keys per day and month, over all gateways together (docs/adr/0076).

The scheduler is asked every two seconds what the keys with budgets have spent, and a request is
judged from memory. A key that was not asked for yet is asked for at once. Without a scheduler
requests are admitted by the last sums and this gateway's own usage.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

from services.gateway.adapters.key_store import KeyStore
from services.gateway.domain.limits.spending import ComputeRates, Exhausted, Unreported, Used, find_exhausted
from services.gateway.domain.usage_records import UsageRecord
from shared.contracts import subjects
from shared.contracts.keys import ApiKey, KeySpending
from shared.contracts.prices import Prices, TokenPrices
from shared.contracts.usage import MAX_KEYS_PER_VIEW, Period, SpendingViewed, Spent, ViewSpending
from shared.errors import InsufficientQuota, RateLimitExceeded, ThawError
from shared.messaging import Mesh
from shared.telemetry.logs import LogRateLimit

log = logging.getLogger(__name__)
ASK_INTERVAL_S = 2.0
_RESERVED_RETRY_MS = 1_000
_HOUR_S = 3600
_NOTHING, _UNUSED = Used(), Spent()
"""Values of keys without active requests, and without usage in the ledger. Never changed."""


@dataclass(slots=True)
class ReservedBudget:
    """The estimate of an active request, which counts against the budgets of its key.

    Attributes:
        key: Name of the key.
        total: The estimates of all active requests of the key.
    """

    key: str
    estimate: Used
    total: Used


class BudgetKeeper:
    """This gateway's copy of the spending of keys with budgets."""

    def __init__(self, mesh: Mesh, keys: KeyStore, unreported: Unreported, reporting: asyncio.Lock) -> None:
        """Keep the budgets of `keys`.

        Args:
            reporting: Held while a report to the ledger is on its way. Sums that are asked for then
                may have what counts as unreported: it would count twice until the next ones.
        """
        self._mesh = mesh
        self._keys = keys
        self._unreported = unreported
        self._reporting = reporting
        self._reserved: dict[str, Used] = {}
        self._rates = ComputeRates()
        self._spent: dict[str, Spent] = {}
        self._known: set[str] = set()
        self._period = self._now = Period.of_hour(0)
        self._hour = 0
        self._prices: Prices | None = None
        self._token_prices: dict[str, tuple[TokenPrices, Decimal]] = {}
        """Prices of recent requests' models, and the highest of a token."""
        self._asking = asyncio.Lock()
        self._failed_at: float | None = None
        self._failures = LogRateLimit()

    # Requests.

    async def prepare(self, key: ApiKey) -> None:
        """Ask for a key that was not asked for yet, unless the scheduler has just not answered."""
        if key.name in self._known:
            return
        async with self._asking:
            is_away = self._failed_at is not None and time.monotonic() - self._failed_at < ASK_INTERVAL_S
            if key.name not in self._known and not is_away:
                await self._ask({key.name} | self._known)

    def reserve(self, key: ApiKey, tokens: float, model: str) -> ReservedBudget:
        """Admit a request, and count its estimate until `release`.

        Args:
            tokens: Estimate of its prompt and completion tokens.

        Returns:
            The reservation, which the caller releases when the request has ended.

        Raises:
            InsufficientQuota: The key has used a budget.
            RateLimitExceeded: Its active requests may use the rest of a budget.
        """
        period = self._present()
        reserved = self._reserved.get(key.name, _NOTHING)
        exhausted = find_exhausted(key, self._spent_in(key.name, period), self._unreported.total(key.name), reserved, period)
        if exhausted is not None:
            raise _refusal(key, exhausted, self._prices)
        if reserved is _NOTHING:
            reserved = self._reserved[key.name] = Used()
        money, device_s = self._estimate(tokens, model), self._rates.estimate(model, tokens)
        reserved.add(tokens, money, device_s)
        return ReservedBudget(key.name, Used(tokens, money, device_s), reserved)

    def release(self, reserved: ReservedBudget) -> None:
        """The request ended: its estimate does not count any more."""
        estimate, total = reserved.estimate, reserved.total
        total.add(-estimate.tokens, -estimate.money, -estimate.device_s)
        if abs(total.tokens) < 1 and not total.money and self._reserved.get(reserved.key) is total:
            del self._reserved[reserved.key]

    def on_record(self, key: ApiKey | None, record: UsageRecord) -> None:
        """A request of the key ended, and is not in the ledger yet."""
        if key is None or not key.has_budget:
            return
        tokens = record.prompt_tokens + record.completion_tokens
        device_s = record.compute_us / 1e6 if record.compute_kind else 0.0
        self._rates.add(record.model, tokens, device_s)
        self._unreported.add(record.key, tokens, self._cost(record), device_s)

    def _cost(self, record: UsageRecord) -> Decimal:
        if self._prices is None:
            return Decimal(0)
        tokens = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
        return self._prices.request_cost(
            self._prices_of(self._prices, record.model)[0], tokens, {record.compute_kind: record.compute_us}
        )

    def _prices_of(self, prices: Prices, model: str) -> tuple[TokenPrices, Decimal]:
        found = self._token_prices.get(model)
        if found is None:
            of_model = prices.of_model(model)
            highest = max(of_model.prompt or Decimal(0), of_model.completion or Decimal(0))
            found = self._token_prices[model] = (of_model, highest / 1_000_000)
        return found

    def list_spending(self) -> dict[str, KeySpending]:
        """Return what the keys with budgets have used, as far as this gateway knows."""
        period, found = self._present(), {}
        for name in {key.name for key in self._keys.list_keys() if key.has_budget}:
            spent, own = self._spent_in(name, period), self._unreported.total(name)
            found[name] = KeySpending(
                day_tokens=spent.day_tokens + int(own.tokens),
                month_tokens=spent.month_tokens + int(own.tokens),
                day_device_s=spent.day_device_s + own.device_s,
                month_device_s=spent.month_device_s + own.device_s,
                day_money=spent.day_money + own.money,
                month_money=spent.month_money + own.money,
            )
        return found

    def _present(self) -> Period:
        """Return the present day and month; computed once in an hour."""
        hour = int(time.time() // _HOUR_S)
        if hour != self._hour:
            self._hour, self._now = hour, Period.of_hour(hour)
        return self._now

    def _spent_in(self, name: str, period: Period) -> Spent:
        """Return the ledger's sums; those of an earlier day or month are over."""
        spent = self._spent.get(name)
        if spent is None:
            return _UNUSED
        gone: dict[str, float | Decimal] = {}
        if self._period.day != period.day:
            gone |= {"day_tokens": 0, "day_device_s": 0.0, "day_money": Decimal(0)}
        if self._period.month != period.month:
            gone |= {"month_tokens": 0, "month_device_s": 0.0, "month_money": Decimal(0)}
        return spent.model_copy(update=gone) if gone else spent

    def _estimate(self, tokens: float, model: str) -> Decimal:
        if self._prices is None:
            return Decimal(0)
        return Decimal(tokens) * self._prices_of(self._prices, model)[1]

    # The ledger's sums.

    async def run(self) -> None:
        """Ask every two seconds until cancelled, while any key has a budget."""
        while True:
            names = {key.name for key in self._keys.list_keys() if key.has_budget}
            # In this order: a request of a new key asks without waiting for the report on its way.
            async with self._reporting, self._asking:
                if names:
                    await self._ask(names)
                else:
                    self._known, self._spent = set(), {}
            await asyncio.sleep(ASK_INTERVAL_S)

    async def _ask(self, names: set[str]) -> None:
        self._unreported.begin_ask()
        listed, spent = sorted(names), dict[str, Spent]()
        has_device_seconds = any(key.has_device_seconds_budget for key in self._keys.list_keys())
        try:
            for at in range(0, len(listed), MAX_KEYS_PER_VIEW):
                keys = tuple(listed[at : at + MAX_KEYS_PER_VIEW])
                query = ViewSpending(keys=keys, has_device_seconds_budget=has_device_seconds)
                answer = await self._mesh.request(subjects.USAGE, query, SpendingViewed)
                spent |= answer.keys
        except ThawError as e:
            self._failed_at = time.monotonic()
            if self._failures.allows(e.code):
                log.warning("budgets are counted without the ledger", extra={"error": e.message})
            return
        self._unreported.on_answer()
        if answer.prices != self._prices:
            self._prices, self._token_prices = answer.prices, {}
        self._spent, self._known, self._period = spent, names, answer.period
        self._failed_at = None
        self._failures.reset()


def _refusal(key: ApiKey, exhausted: Exhausted, prices: Prices | None) -> ThawError:
    unit = exhausted.unit or (prices.currency if prices is not None else "")
    budget = f"{exhausted.budget} {unit}".rstrip()
    ends = datetime.fromtimestamp(exhausted.ends_at * _HOUR_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if exhausted.is_reserved:
        error = RateLimitExceeded(
            f"Active requests of the API key {key.name} may use the rest of its budget of {budget} per {exhausted.period}. "
            "Repeat the request when some have finished",
            retry_after_ms=_RESERVED_RETRY_MS,
        )
        error.limit = "budget"
        return error
    return InsufficientQuota(
        f"The API key {key.name} has used its budget of {budget} per {exhausted.period}. The {exhausted.period} ends at {ends}; "
        "its operator can raise the budget",
        should_retry=False,
    )
