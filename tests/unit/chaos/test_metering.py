"""The ledger's bounds of a campaign: exact without cut requests, and never below the answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.chaos.metering import ATTEMPTS, Bounds, Sent, Usage, expect, find_faults, find_spending_faults, read_rows
from bench.chaos.verdict import Answer, Exchange, Job

JOB = Job(1, "one", "question", 3, stream=True, caller="a")
KEYED = replace(JOB, key="k")
GOOD = Answer("a b c", "length", 3, "id-1")
FAILED = Answer(error="reset", disconnected=True)


def bounds(exchange: Exchange, *, is_disturbed: bool = False) -> Bounds:
    return expect([Sent(exchange, is_disturbed)])["a", "one"]


def test_undisturbed_answer_is_metered_exactly() -> None:
    assert bounds(Exchange(JOB, 0.0, 1.0, GOOD)) == Bounds(Usage(1, 3), Usage(1, 3))


def test_answers_to_one_key_are_one_request() -> None:
    assert bounds(Exchange(KEYED, 0.0, 1.0, GOOD, [GOOD])) == Bounds(Usage(1, 3), Usage(1, 3))


@pytest.mark.parametrize(
    ("exchange", "is_disturbed", "more"),
    [
        (Exchange(JOB, 0.0, 1.0, GOOD, cuts=1), False, 2 * ATTEMPTS),
        (Exchange(JOB, 0.0, 1.0, GOOD), True, ATTEMPTS),
        (Exchange(JOB, 0.0, 1.0, GOOD, server_errors=2), False, 2),
        (Exchange(KEYED, 0.0, 1.0, GOOD, [FAILED]), False, ATTEMPTS),
    ],
)
def test_attempts_without_an_answer_may_be_metered(exchange: Exchange, is_disturbed: bool, more: int) -> None:
    found = bounds(exchange, is_disturbed=is_disturbed)
    assert found == Bounds(Usage(1, 3), Usage(1 + more, 3 + 3 * more))


@pytest.mark.parametrize("cuts", [0, 1])
def test_answer_to_a_key_counts_once_though_gateways_are_struck(cuts: int) -> None:
    """Its attempts may have more tokens."""
    found = bounds(Exchange(KEYED, 0.0, 1.0, GOOD, [GOOD], cuts=cuts), is_disturbed=True)
    assert found == Bounds(Usage(1, 3), Usage(1 + cuts, 3 + 3 * 2 * ATTEMPTS * (1 + cuts)))


def test_failed_request_need_not_be_metered() -> None:
    assert bounds(Exchange(JOB, 0.0, 1.0, FAILED)).least == Usage()


def test_other_answers_count_too() -> None:
    assert expect([], [("p", "two", GOOD), ("p", "two", GOOD)]) == {("p", "two"): Bounds(Usage(2, 6), Usage(2, 6))}


def row(key: str, adapter: str = "", requests: int = 4) -> dict[str, Any]:
    counts = {"requests": requests, "failed": min(1, requests), "prompt_tokens": 2, "completion_tokens": 9}
    return {"key": key, "model": "one", "adapter": adapter, "counts": counts}


def test_rows_are_summed_by_key_model_and_adapter_without_failed_requests() -> None:
    rows = [row("a"), row("a", "style"), row("a", "style"), row("b"), row("owner", requests=0)]
    assert read_rows(rows) == {("a", "one"): Usage(3, 9), ("a", "one:style"): Usage(6, 18), ("b", "one"): Usage(3, 9)}


def test_ledger_outside_the_bounds_is_a_fault() -> None:
    name = ("a", "one")
    expected = {name: Bounds(Usage(2, 6), Usage(3, 9))}
    assert find_faults(expected, {name: Usage(2, 9)}) == []
    assert find_faults(expected, {name: Usage(1, 6)}) == ["one for a: 1 requests in the ledger, not 2 to 3"]
    assert find_faults(expected, {name: Usage(3, 10)}) == ["one for a: 10 tokens in the ledger, not 6 to 9"]
    assert find_faults({}, {("b", "two"): Usage(1, 0)}) == ["two for b: 1 requests in the ledger, not 0 to 0"]
    assert find_faults(expected, {}) == [
        "one for a: 0 requests in the ledger, not 2 to 3",
        "one for a: 0 tokens in the ledger, not 6 to 9",
    ]


def test_budget_that_differs_from_the_ledger_is_a_fault() -> None:
    rows = [row("a"), row("a", "style"), row("b")]
    right = {"a": {"month_tokens": 22}, "b": {"month_tokens": 11}}
    assert find_spending_faults(["a", "b", "unused"], rows, [right, right]) == []
    assert find_spending_faults(["a", "b"], rows, [right, {"b": {"month_tokens": 12}}]) == [
        "a: 0 tokens against the budget, 22 in the ledger",
        "b: 12 tokens against the budget, 11 in the ledger",
    ]
