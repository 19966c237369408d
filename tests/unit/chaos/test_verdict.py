"""A campaign's lost, broken, truncated, wrong and duplicate responses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.chaos.verdict import Answer, Exchange, Fate, Job, Reference, first_difference, judge

JOB = Job(1, "one", "question", 3, stream=True)
KEYED = replace(JOB, key="k")
SAMPLED = replace(KEYED, temperature=1.0)
GOOD = Answer("a b c", "length", 3, "id-1")
REFERENCE = Reference(replace(GOOD, response_id="id-0"))


def judged(answer: Answer, *repeats: Answer, job: Job = JOB, broken: str | None = None, reference: Reference = REFERENCE) -> Fate:
    return judge(Exchange(job, 0.0, 1.0, answer, list(repeats), broken=broken), reference)


def test_the_undisturbed_answer_is_right() -> None:
    assert judged(GOOD) == "ok"


@pytest.mark.parametrize(
    ("answer", "fate"),
    [
        (replace(GOOD, error="503"), "lost"),
        (replace(GOOD, finish=None), "truncated"),
        (replace(GOOD, text="a b"), "wrong"),
        (replace(GOOD, text="a b b c"), "wrong"),
        (replace(GOOD, finish="stop"), "wrong"),
        (replace(GOOD, tokens=4), "wrong"),
    ],
)
def test_faulty_answers_are_classified(answer: Answer, fate: Fate) -> None:
    assert judged(answer) == fate


def test_stream_broken_while_its_gateway_lives_counts_as_broken() -> None:
    assert judged(replace(GOOD, error="reset"), broken="reset at gateway.1") == "broken"


@pytest.mark.parametrize("other", [replace(GOOD, response_id="id-2"), replace(GOOD, text="a b d"), replace(GOOD, finish="stop")])
def test_different_answers_to_one_key_count_as_twice(other: Answer) -> None:
    assert judged(GOOD, other, job=KEYED) == "twice"
    assert judged(GOOD, GOOD, job=KEYED) == "ok"


def test_failed_repetition_counts_as_lost() -> None:
    assert judged(GOOD, Answer(error="503"), job=KEYED) == "lost"


def test_sampled_answer_is_compared_only_with_its_repetition() -> None:
    sampled = Answer("x y z", "length", 3, "id-1")
    assert judged(sampled, sampled, job=SAMPLED) == "ok"
    assert judged(sampled, GOOD, job=SAMPLED) == "twice"
    assert judged(replace(sampled, tokens=2), job=SAMPLED) == "wrong"


def test_a_near_tie_is_no_fault_and_a_clear_difference_is() -> None:
    ends = (1, 3, 5)
    other = replace(GOOD, text="a b d")
    assert judged(other, reference=replace(REFERENCE, ends=ends, gaps=(4.0, 4.0, 0.01))) == "near tie"
    assert judged(other, reference=replace(REFERENCE, ends=ends, gaps=(4.0, 4.0, 4.0))) == "wrong"
    assert judged(replace(other, tokens=2), reference=replace(REFERENCE, ends=ends, gaps=(4.0, 4.0, 0.01))) == "wrong"


def test_first_difference_of_two_texts_is_found() -> None:
    assert [first_difference(*p) for p in (("abc", "abd"), ("ab", "abc"), ("", "a"))] == [2, 2, 0]
