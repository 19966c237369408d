"""Compare the ledger of usage with the answers that the clients have. Pure.

Each response that a client has in whole must be in the ledger, once (ADR 0070). Requests whose
connection broke with their gateway may be in it: the ledger must lie between the sum of the answers
and that sum with all attempts that can have been recorded. If no gateway was struck the two are
equal, and the ledger must be exact. Answered requests with an Idempotency-Key count once in any
case (ADR 0095).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.chaos.verdict import Answer, Exchange

ATTEMPTS = 3
"""Attempts of the `openai` package for one call: one, and two retries."""


@dataclass(frozen=True)
class Usage:
    """The usage of one model by one key.

    Attributes:
        requests: With a complete response.
        tokens: Completion tokens of every attempt, failed ones included.
    """

    requests: int = 0
    tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.requests + other.requests, self.tokens + other.tokens)


@dataclass(frozen=True)
class Bounds:
    """Bounds of the ledger's usage of a model by a key."""

    least: Usage = Usage()
    most: Usage = Usage()

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.least + other.least, self.most + other.most)


@dataclass(frozen=True)
class Sent:
    """An exchange, and whether a gateway was struck while it lasted."""

    exchange: Exchange
    is_disturbed: bool


Name = tuple[str, str]
"""Names of an API key and a model."""


def expect(sent: Iterable[Sent], others: Iterable[tuple[str, str, Answer]] = ()) -> dict[Name, Bounds]:
    """Return the bounds by key and model.

    Args:
        sent: All exchanges of clients.
        others: Keys, models and answers of undisturbed requests beside them.
    """
    found: defaultdict[Name, Bounds] = defaultdict(Bounds)
    for caller, model, answer in others:
        usage = Usage(1, answer.tokens)
        found[caller, model] += Bounds(usage, usage)
    for one in sent:
        found[one.exchange.job.caller, one.exchange.job.model] += _bounds_of(one)
    return dict(found)


def _bounds_of(sent: Sent) -> Bounds:
    """Answers with the same id are one request: the others replay it."""
    exchange = sent.exchange
    complete = {a.response_id: a.tokens for a in (exchange.answer, *exchange.repeats) if a.error is None and a.finish is not None}
    least = Usage(len(complete), sum(complete.values()))
    more = _count_unknown(sent)
    is_answered = bool(exchange.job.key) and len(complete) == 1 and not _count_failed(exchange)
    # A key has one response, whichever gateways are struck. One that was cut may have been deleted
    # after its end.
    requests = min(more, exchange.cuts) if is_answered else more
    return Bounds(least, least + Usage(requests, more * exchange.job.tokens))


def _count_failed(exchange: Exchange) -> int:
    return sum(a.error is not None for a in (exchange.answer, *exchange.repeats))


def _count_unknown(sent: Sent) -> int:
    """Return how many attempts may be in the ledger beside the answered ones."""
    exchange = sent.exchange
    if sent.is_disturbed or exchange.cuts:
        return ATTEMPTS * (1 + exchange.cuts) * (1 + len(exchange.repeats))
    return exchange.server_errors + ATTEMPTS * _count_failed(exchange)


def read_rows(rows: Iterable[Mapping[str, Any]]) -> dict[Name, Usage]:
    """Return the ledger by key and model, from rows of `/admin/v1/usage?by=key,model,adapter`.

    Rows of memory held, which have no requests, are left out.
    """
    found: defaultdict[Name, Usage] = defaultdict(Usage)
    for row in rows:
        counts = row["counts"]
        model = f"{row['model']}:{row['adapter']}" if row["adapter"] else row["model"]
        if counts["requests"]:
            found[row["key"], model] += Usage(counts["requests"] - counts["failed"], counts["completion_tokens"])
    return dict(found)


def find_faults(expected: Mapping[Name, Bounds], ledger: Mapping[Name, Usage]) -> list[str]:
    """Return in words where the ledger is outside the bounds."""
    faults: list[str] = []
    for name in sorted({*expected, *ledger}):
        bounds, usage = expected.get(name, Bounds()), ledger.get(name, Usage())
        for what in ("requests", "tokens"):
            least, has, most = (getattr(u, what) for u in (bounds.least, usage, bounds.most))
            if not least <= has <= most:
                faults.append(f"{name[1]} for {name[0]}: {has} {what} in the ledger, not {least} to {most}")
    return faults


def find_spending_faults(
    callers: Iterable[str], rows: Iterable[Mapping[str, Any]], spending: Iterable[Mapping[str, Mapping[str, Any]]]
) -> list[str]:
    """Return in words where a gateway's view of the budgets differs from the ledger.

    Args:
        callers: Names of keys with budgets.
        rows: As for `read_rows`; those of the present month.
        spending: What each gateway counts against the budgets, by key (`/admin/v1/keys`).
    """
    used: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        used[row["key"]] += row["counts"]["prompt_tokens"] + row["counts"]["completion_tokens"]
    return [
        f"{caller}: {counted} tokens against the budget, {used[caller]} in the ledger"
        for of_gateway in spending
        for caller in callers
        if (counted := of_gateway.get(caller, {}).get("month_tokens", 0)) != used[caller]
    ]
