"""Budgets of keys per day and month: what the ledger has, and what it does not have yet.

The ledger's sums arrive every few seconds. To them a gateway adds what its own requests have used
and the sums do not have, and what its active requests are expected to use:

1. A finished request counts in the open segment. A report to the ledger begins with a cut: the open
   segment is closed at the spool's size.
2. A closed segment whose end the ledger has reached is confirmed. It counts until the ledger's sums
   arrive that were asked for after the confirmation.
3. A reply that was lost leaves a segment closed that the sums have. So requests may count twice for
   a few seconds; a request never counts too little on its own gateway. Only its share of a cold
   start is not known before the ledger has all requests that waited for the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TypeVar

from shared.contracts.keys import KeyLimits
from shared.contracts.usage import Period, Spent

_MAX_CLOSED = 4
"""Segments beyond it are merged: without a scheduler none is confirmed."""
_RECENT = 8
"""Requests over which the device-seconds of a token are averaged."""
_Amount = TypeVar("_Amount", float, Decimal)


@dataclass(slots=True)
class Used:
    """An amount of tokens, their cost, and the seconds that devices computed for them."""

    tokens: float = 0.0
    money: Decimal = Decimal(0)
    device_s: float = 0.0

    def add(self, tokens: float, money: Decimal, device_s: float) -> None:
        self.tokens += tokens
        self.money += money
        self.device_s += device_s


_Sums = dict[str, Used]


@dataclass(slots=True)
class Unreported:
    """Usage of this gateway's requests that the ledger's sums may not have, by key."""

    _open: _Sums = field(default_factory=dict)
    _closed: list[tuple[int, _Sums]] = field(default_factory=list)
    _confirmed: _Sums = field(default_factory=dict)
    _asked: _Sums = field(default_factory=dict)
    _totals: _Sums = field(default_factory=dict)
    """Totals of all segments since the last answer, as far as they were asked for."""

    def add(self, key: str, tokens: float, money: Decimal, device_s: float) -> None:
        """A request ended."""
        used = self._open.get(key)
        if used is None:
            used = self._open[key] = Used()
        used.add(tokens, money, device_s)
        if (total := self._totals.get(key)) is not None:
            total.add(tokens, money, device_s)

    def cut(self, size: int) -> None:
        """A report begins; the spool ends at `size`, after all records that were added."""
        if not self._open:
            return
        if len(self._closed) >= _MAX_CLOSED:
            _merge(self._open, self._closed.pop()[1])
        self._closed.append((size, self._open))
        self._open = {}

    def confirm(self, position: int) -> None:
        """The ledger has the spool up to `position`."""
        while self._closed and self._closed[0][0] <= position:
            _merge(self._confirmed, self._closed.pop(0)[1])

    def begin_ask(self) -> None:
        """The ledger is asked for its sums, which will have what was confirmed by now."""
        _merge(self._asked, self._confirmed)
        self._confirmed = {}

    def on_answer(self) -> None:
        """The sums that were asked for have arrived."""
        self._asked = {}
        self._totals = {}

    def total(self, key: str) -> Used:
        """Return what the key used, for the caller to read at once: later requests are added."""
        found = self._totals.get(key)
        if found is None:
            found = self._totals[key] = Used()
            for sums in (self._open, self._confirmed, self._asked, *(sums for _, sums in self._closed)):
                if (used := sums.get(key)) is not None:
                    found.add(used.tokens, used.money, used.device_s)
        return found


def _merge(into: _Sums, more: Mapping[str, Used]) -> None:
    for key, used in more.items():
        into.setdefault(key, Used()).add(used.tokens, used.money, used.device_s)


@dataclass(slots=True)
class ComputeRates:
    """Device-seconds of a token of each model's recent requests, to estimate active ones.

    Requests of a model that has not answered yet are estimated as 0.
    """

    _of_models: dict[str, float] = field(default_factory=dict)

    def add(self, model: str, tokens: int, device_s: float) -> None:
        """A request ended."""
        if tokens <= 0:
            return
        rate = device_s / tokens
        before = self._of_models.get(model, rate)
        self._of_models[model] = before + (rate - before) / _RECENT

    def estimate(self, model: str, tokens: float) -> float:
        """Estimate the device-seconds of a request with so many tokens."""
        return self._of_models.get(model, 0.0) * tokens


@dataclass(frozen=True, slots=True)
class Exhausted:
    """A budget that refuses a request.

    Attributes:
        budget: Its size.
        unit: The unit of the budget; None: money.
        ends_at: The hour since 1970 at which its period ends.
        is_reserved: Only with the active requests, which may use less.
    """

    budget: str
    unit: str | None
    period: str
    ends_at: int
    is_reserved: bool


def find_exhausted(limits: KeyLimits, spent: Spent, unreported: Used, reserved: Used, period: Period) -> Exhausted | None:
    """Return the budget that the key has used, the longest period first; None if it has some left.

    Args:
        spent: The ledger's sums of `period`.
        reserved: Estimates of the active requests.
    """
    if not _is_any_exhausted(limits, spent, unreported, reserved):
        return None
    found: Exhausted | None = None
    for name, ends_at, budgets, used in (
        (
            "month",
            period.month_end,
            (limits.tokens_per_month, limits.device_seconds_per_month, limits.money_per_month),
            (spent.month_tokens, spent.month_device_s, spent.month_money),
        ),
        (
            "day",
            period.day_end,
            (limits.tokens_per_day, limits.device_seconds_per_day, limits.money_per_day),
            (spent.day_tokens, spent.day_device_s, spent.day_money),
        ),
    ):
        tokens, device_s, money = budgets
        for budget, unit, is_reserved in (
            (tokens, "tokens", _judge(tokens, used[0] + unreported.tokens, reserved.tokens)),
            (device_s, "device-seconds", _judge(device_s, used[1] + unreported.device_s, reserved.device_s)),
            (money, None, _judge(money, used[2] + unreported.money, reserved.money)),
        ):
            if is_reserved is None:
                continue
            exhausted = Exhausted(_format(budget), unit, name, ends_at, is_reserved=is_reserved)
            if not is_reserved:
                return exhausted
            found = found or exhausted
    return found


def _is_any_exhausted(limits: KeyLimits, spent: Spent, unreported: Used, reserved: Used) -> bool:
    """True if `find_exhausted` finds a budget: most requests need no more than this."""
    return (
        (
            limits.tokens_per_month is not None
            and spent.month_tokens + unreported.tokens + reserved.tokens >= limits.tokens_per_month
        )
        or (limits.tokens_per_day is not None and spent.day_tokens + unreported.tokens + reserved.tokens >= limits.tokens_per_day)
        or (
            limits.device_seconds_per_month is not None
            and spent.month_device_s + unreported.device_s + reserved.device_s >= limits.device_seconds_per_month
        )
        or (
            limits.device_seconds_per_day is not None
            and spent.day_device_s + unreported.device_s + reserved.device_s >= limits.device_seconds_per_day
        )
        or (limits.money_per_month is not None and spent.month_money + unreported.money + reserved.money >= limits.money_per_month)
        or (limits.money_per_day is not None and spent.day_money + unreported.money + reserved.money >= limits.money_per_day)
    )


def _judge(budget: _Amount | None, used: _Amount, reserved: _Amount) -> bool | None:
    """Return None if a budget has some left, and else whether only with what is reserved."""
    if budget is None or used + reserved < budget:
        return None
    return used < budget


def _format(budget: float | Decimal | None) -> str:
    return f"{budget:.12g}" if isinstance(budget, float) else str(budget)
