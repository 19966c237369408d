"""The ledger's bounds of a campaign: exact without cut requests, and never below the answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.chaos.metering import ATTEMPTS, Bounds, Sent, Usage, expect, find_faults, read_rows
from bench.chaos.verdict import Answer, Exchange, Job

JOB = Job(1, "one", "question", 3, stream=True)
KEYED = replace(JOB, key="k")
GOOD = Answer("a b c", "length", 3, "id-1")
FAILED = Answer(error="reset", disconnected=True)


def bounds(exchange: Exchange, *, is_disturbed: bool = False) -> Bounds:
    return expect([Sent(exchange, is_disturbed)])["one"]


def test_undisturbed_answer_is_metered_exactly() -> None:
    assert bounds(Exchange(JOB, 0.0, 1.0, GOOD)) == Bounds(Usage(1, 3), Usage(1, 3))


def test_answers_to_one_key_are_one_request() -> None:
    assert bounds(Exchange(KEYED, 0.0, 1.0, GOOD, [GOOD])) == Bounds(Usage(1, 3), Usage(1, 3))


@pytest.mark.parametrize(
    ("exchange", "is_disturbed", "more"),
    [
        (Exchange(JOB, 0.0, 1.0, GOOD, cuts=1), False, 2 * ATTEMPTS),
        (Exchange(JOB, 0.0, 1.0, GOOD), True, ATTEMPTS),
        (Exchange(KEYED, 0.0, 1.0, GOOD, [GOOD]), True, 2 * ATTEMPTS),
        (Exchange(JOB, 0.0, 1.0, GOOD, server_errors=2), False, 2),
        (Exchange(KEYED, 0.0, 1.0, GOOD, [FAILED]), False, ATTEMPTS),
    ],
)
def test_attempts_without_an_answer_may_be_metered(exchange: Exchange, is_disturbed: bool, more: int) -> None:
    found = bounds(exchange, is_disturbed=is_disturbed)
    assert found == Bounds(Usage(1, 3), Usage(1 + more, 3 + 3 * more))


def test_failed_request_need_not_be_metered() -> None:
    assert bounds(Exchange(JOB, 0.0, 1.0, FAILED)).least == Usage()


def test_other_answers_count_too() -> None:
    assert expect([], [("two", GOOD), ("two", GOOD)]) == {"two": Bounds(Usage(2, 6), Usage(2, 6))}


def test_rows_are_summed_by_model_and_adapter_without_failed_requests() -> None:
    counts = {"requests": 4, "failed": 1, "completion_tokens": 9}
    rows = [{"model": "one", "adapter": a, "counts": counts} for a in ("", "style", "style")]
    assert read_rows(rows) == {"one": Usage(3, 9), "one:style": Usage(6, 18)}


def test_ledger_outside_the_bounds_is_a_fault() -> None:
    expected = {"one": Bounds(Usage(2, 6), Usage(3, 9))}
    assert find_faults(expected, {"one": Usage(2, 9)}) == []
    assert find_faults(expected, {"one": Usage(1, 6)}) == ["one: 1 requests in the ledger, not 2 to 3"]
    assert find_faults(expected, {"one": Usage(3, 10)}) == ["one: 10 tokens in the ledger, not 6 to 9"]
    assert find_faults({}, {"two": Usage(1, 0)}) == ["two: 1 requests in the ledger, not 0 to 0"]
    assert find_faults(expected, {}) == ["one: 0 requests in the ledger, not 2 to 3", "one: 0 tokens in the ledger, not 6 to 9"]
