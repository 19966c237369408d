"""The spending of keys in the present day and month, beside the ledger.

The sums are read from Postgres once in each day and term. Each report that is recorded is added to
them, so that a gateway's question costs no query. Shares of cold starts change with each request
that waited for the start: they are read again after reports of such requests, and so is the memory
held after it was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

from services.scheduler.adapters.ledger import Ledger, StartSeconds, Tokens
from shared.contracts.usage import Counts, Period, ReportUsage, SpendingViewed, Spent, UsageRecorded, UsageRow, ViewSpending

_Part = Literal["starts", "memory", "background"]


@dataclass(slots=True)
class _Sums:
    """Sums since `since`.

    Tokens by key and model; microseconds of computing, for requests and for none, and byte-seconds
    held, by key and kind; what starts cost by key.
    """

    since: int
    tokens: dict[str, dict[str, Tokens]] = field(default_factory=dict)
    compute_us: dict[str, dict[str, int]] = field(default_factory=dict)
    starts: dict[str, StartSeconds] = field(default_factory=dict)
    byte_s: dict[str, dict[str, float]] = field(default_factory=dict)
    background_us: dict[str, dict[str, float]] = field(default_factory=dict)

    def compute_of(self, key: str) -> dict[str, int]:
        """Return a key's microseconds by kind, for requests and for none."""
        own, background = self.compute_us.get(key, {}), self.background_us.get(key, {})
        return {kind: own.get(kind, 0) + round(background.get(kind, 0.0)) for kind in (*own, *background)}

    def add(self, row: UsageRow) -> None:
        self.add_tokens(row.key, row.model, _tokens(row.counts))
        of_key = self.compute_us.setdefault(row.key, {"cpu": 0, "cuda": 0})
        of_key["cpu"] += row.counts.compute_cpu_us
        of_key["cuda"] += row.counts.compute_cuda_us

    def add_tokens(self, key: str, model: str, more: Tokens) -> None:
        of_key = self.tokens.setdefault(key, {})
        prompt, cached, completion = of_key.get(model, (0, 0, 0))
        of_key[model] = (prompt + more[0], cached + more[1], completion + more[2])


class Spending:
    """Sums of one term; `view` and `record` must not run concurrently."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._prices = ledger.prices
        self._period: Period | None = None
        self._day, self._month = _Sums(0), _Sums(0)
        self._stale: set[_Part] = set()
        """Parts of the sums of which more was recorded since they were read."""

    async def record(self, epoch: int, report: ReportUsage, hour: int) -> UsageRecorded:
        """Record a report in the ledger; as `Ledger.record`."""
        try:
            return await self._ledger.record(epoch, report, hour, self._add)
        except BaseException:
            self._period = None  # it may be recorded: read the sums again
            raise

    def note_held(self) -> None:
        """Read memory held, starts and work of no request again: more of them was recorded."""
        self._stale |= {"starts", "memory", "background"}

    def _add(self, report: ReportUsage) -> None:
        if self._period is None:
            return  # the next question reads all of it
        for row in (*report.rows, *(response.row for response in report.responses)):
            for sums in (self._day, self._month):
                if row.hour >= sums.since:
                    sums.add(row)
        if report.waits or any(response.wait is not None for response in report.responses):
            self._stale.add("starts")

    async def view(self, query: ViewSpending, hour: int) -> SpendingViewed:
        """Return what the keys have spent."""
        period = Period.of_hour(hour)
        if self._period != period:
            self._period = None
            self._day, self._month = await self._read(period.day), await self._read(period.month)
            self._period = period
            self.note_held()
        both = (self._day, self._month)
        if "starts" in self._stale and (query.has_device_seconds_budget or self._are_starts_priced()):
            with self._reading("starts"):
                for sums in both:
                    sums.starts = await self._ledger.sum_starts(sums.since)
        if "background" in self._stale:
            with self._reading("background"):
                for sums in both:
                    sums.background_us = await self._ledger.sum_background_us(sums.since)
        if "memory" in self._stale and self._prices is not None and self._prices.gib_hours:
            with self._reading("memory"):
                for sums in both:
                    sums.byte_s = await self._ledger.sum_byte_s(sums.since)
        return SpendingViewed(
            period=period, keys={key: spent for key in query.keys if (spent := self._spent(key)) != Spent()}, prices=self._prices
        )

    @contextmanager
    def _reading(self, part: _Part) -> Iterator[None]:
        """Note that a part is being read: `note_held` may be called meanwhile, and counts."""
        self._stale.discard(part)
        try:
            yield
        except BaseException:
            self._stale.add(part)
            raise

    def _are_starts_priced(self) -> bool:
        return self._prices is not None and bool(self._prices.device_seconds or self._prices.clearing_seconds)

    async def _read(self, since: int) -> _Sums:
        sums = _Sums(since, compute_us=await self._ledger.sum_compute_us(since))
        for (key, model), tokens in (await self._ledger.sum_tokens(since)).items():
            sums.add_tokens(key, model, tokens)
        return sums

    def _spent(self, key: str) -> Spent:
        return Spent(
            day_tokens=_count(self._day, key),
            month_tokens=_count(self._month, key),
            day_device_s=_device_s(self._day, key),
            month_device_s=_device_s(self._month, key),
            day_money=self._cost(self._day, key),
            month_money=self._cost(self._month, key),
        )

    def _cost(self, sums: _Sums, key: str) -> Decimal:
        if self._prices is None:
            return Decimal(0)
        starts, byte_s, us = sums.starts.get(key, StartSeconds()), sums.byte_s.get(key), sums.compute_of(key)
        others = self._prices.cost("", (0, 0, 0), starts.cold, byte_s, us, starts.clearing).total
        return sum((self._prices.cost(m, tokens).total for m, tokens in sums.tokens.get(key, {}).items()), others)


def _count(sums: _Sums, key: str) -> int:
    return sum(prompt + completion for prompt, _, completion in sums.tokens.get(key, {}).values())


def _device_s(sums: _Sums, key: str) -> float:
    """Sum up computing and cold starts; the seconds of clearing are a part of their starts."""
    started = sums.starts.get(key, StartSeconds())
    return sum(sums.compute_of(key).values()) / 1e6 + sum(started.cold.values())


def _tokens(counts: Counts) -> Tokens:
    return counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens
