"""Output of `thaw explain --what-if`."""

from __future__ import annotations

import pytest

from shared.contracts.admin import AssumeBudget, AssumeNode, AssumeNoNode, Assumption, QueuePlace
from shared.contracts.plans import Candidate, PlanRecord
from thaw.cli.explain import assumption, outcome, queue_line
from thaw.errors import CommandError


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("add-node=big", AssumeNode(node="big")),
        ("add-node=big:8", AssumeNode(node="big", devices=8)),
        ("add-node=big:8:80GiB", AssumeNode(node="big", devices=8, nbytes=80 * 2**30)),
        ("budget=n1/cuda:0:40GiB", AssumeBudget(node="n1", device="cuda:0", nbytes=40 * 2**30)),
        ("drop-node=n1", AssumeNoNode(node="n1")),
    ],
)
def test_assumption_text_is_parsed(text: str, meant: Assumption) -> None:
    assert assumption(text) == meant


@pytest.mark.parametrize(
    "text",
    ["add-node=", "add-node=n:x", "add-node=n:1:2:3", "add-node=n:1:lots", "budget=n1", "budget=n1/cuda", "more", "drop-node"],
)
def test_an_invalid_assumption_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="not understood"):
        assumption(text)


@pytest.mark.parametrize(
    ("measured_ms", "expected"),
    [
        (4200.0, "ready after 4.2 s, 2.9 s from the decision [dim](predicted 2.1 s, 800 ms too little)"),
        (2940.0, "ready after 2.9 s [dim](predicted 2.1 s, 800 ms too little)"),
    ],
    ids=["waited before", "decided at once"],
)
def test_the_outcome_compares_prediction_and_measurement(measured_ms: float, expected: str) -> None:
    """The parts of an outcome add up to its total.

    A prediction counts from the decision, the outcome from the demand; the output shows both if
    they differ.
    """
    chosen = Candidate(node="n", device_ids=("cpu:0",), way="load", predicted_ms=2100.0, took_ms=2900.0)
    plan = PlanRecord(
        plan_id="p", model="m", created=0, trigger="demand", way="load", chosen=chosen, outcome="ready", measured_ms=measured_ms
    )
    assert expected in outcome(plan)


def test_the_outcome_has_the_victims_and_the_cause_of_a_restart() -> None:
    chosen = Candidate(node="n", device_ids=("cpu:0",), way="evict_then_load", victims=("b (b-1)", "c (c-1)"), cleared_ms=1500.0)
    plan = PlanRecord(plan_id="p", model="a", created=0, trigger="demand", way="evict_then_load", chosen=chosen, caused_by="plan-7")
    text = outcome(plan)
    assert "cleared: 2 instances left for it within 1.5" in text
    assert "caused by: plan-7, which took the memory of a" in text


@pytest.mark.parametrize(
    ("position", "length", "waiting", "text"),
    [
        (1, 1, 1, "waits for room: 1 request waiting"),
        (2, 3, 4, "waits for room, number 2 of 3 models that wait: 4 requests waiting"),
    ],
)
def test_queue_position_is_printed_as_a_sentence(position: int, length: int, waiting: int, text: str) -> None:
    line = queue_line(QueuePlace(position=position, length=length, waiting=waiting, since_ms=2000))
    assert line.strip().startswith(text)
