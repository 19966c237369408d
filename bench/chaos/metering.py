"""Compare the ledger of usage with the answers that the clients have. Pure.

Each response that a client has in whole must be in the ledger, once (ADR 0070). Requests whose
connection broke with their gateway may be in it: the ledger must lie between the sum of the answers
and that sum with all attempts that can have been recorded. If no gateway was struck the two are
equal, and the ledger must be exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.chaos.verdict import Answer, Exchange

ATTEMPTS = 3
"""Of the `openai` package for one call: one, and two retries."""


@dataclass(frozen=True)
class Usage:
    """Requests with a complete response, and the completion tokens of a model.

    `tokens` are those of every attempt, failed ones included.
    """

    requests: int = 0
    tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.requests + other.requests, self.tokens + other.tokens)


@dataclass(frozen=True)
class Bounds:
    """What the ledger may have of a model."""

    least: Usage = Usage()
    most: Usage = Usage()

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.least + other.least, self.most + other.most)


@dataclass(frozen=True)
class Sent:
    """An exchange, and whether a gateway was struck while it lasted."""

    exchange: Exchange
    is_disturbed: bool


def expect(sent: Iterable[Sent], others: Iterable[tuple[str, Answer]] = ()) -> dict[str, Bounds]:
    """Return the bounds by model.

    Args:
        sent: All exchanges of clients.
        others: Models and answers of undisturbed requests beside them.
    """
    found: defaultdict[str, Bounds] = defaultdict(Bounds)
    for model, answer in others:
        usage = Usage(1, answer.tokens)
        found[model] += Bounds(usage, usage)
    for one in sent:
        found[one.exchange.job.model] += _bounds_of(one)
    return dict(found)


def _bounds_of(sent: Sent) -> Bounds:
    """Answers with the same id are one request: the others replay it."""
    exchange = sent.exchange
    complete = {a.response_id: a.tokens for a in (exchange.answer, *exchange.repeats) if a.error is None and a.finish is not None}
    least = Usage(len(complete), sum(complete.values()))
    more = _count_unknown(sent)
    return Bounds(least, least + Usage(more, more * exchange.job.tokens))


def _count_unknown(sent: Sent) -> int:
    """Return how many attempts may be in the ledger beside the answered ones."""
    exchange = sent.exchange
    if sent.is_disturbed or exchange.cuts:
        return ATTEMPTS * (1 + exchange.cuts) * (1 + len(exchange.repeats))
    failed = sum(a.error is not None for a in (exchange.answer, *exchange.repeats))
    return exchange.server_errors + ATTEMPTS * failed


def read_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, Usage]:
    """Return the ledger by model, from rows of `/admin/v1/usage?by=model,adapter`."""
    found: defaultdict[str, Usage] = defaultdict(Usage)
    for row in rows:
        counts = row["counts"]
        name = f"{row['model']}:{row['adapter']}" if row["adapter"] else row["model"]
        found[name] += Usage(counts["requests"] - counts["failed"], counts["completion_tokens"])
    return dict(found)


def find_faults(expected: Mapping[str, Bounds], ledger: Mapping[str, Usage]) -> list[str]:
    """Return in words where the ledger is outside the bounds."""
    faults: list[str] = []
    for model in sorted({*expected, *ledger}):
        bounds, usage = expected.get(model, Bounds()), ledger.get(model, Usage())
        for what in ("requests", "tokens"):
            least, has, most = (getattr(u, what) for u in (bounds.least, usage, bounds.most))
            if not least <= has <= most:
                faults.append(f"{model}: {has} {what} in the ledger, not {least} to {most}")
    return faults
