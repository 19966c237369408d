"""Which requests meet their model's objective, and the reports of the counts."""

from __future__ import annotations

import pytest

from services.gateway.domain.engine_request import EngineRequest
from services.gateway.domain.objectives import ObjectiveCounter, meets_objective
from services.gateway.domain.ticket import Ticket
from services.gateway.requests.infer_message import encode_infer
from shared.contracts.inference import InferRequest
from shared.contracts.models import Slo
from shared.contracts.objectives import MAX_MODELS_PER_REPORT, REPORT_LOST_AFTER_S, ObjectiveStanding
from shared.errors import EngineFailed, InvalidRequest, QueueFull, ThawError

SLO = Slo(ttft=1.0, tpot=0.1)


@pytest.mark.parametrize(
    ("slo", "ttft_s", "tpot_s", "duration_s", "error", "has_client_left", "expected"),
    [
        (Slo(), 9.0, 9.0, 9.0, None, False, None),
        (SLO, 1.0, 0.1, 5.0, None, False, True),
        (SLO, 1.1, 0.1, 5.0, None, False, False),
        (SLO, 1.0, 0.2, 5.0, None, False, False),
        (Slo(ttft=1.0), 1.0, 9.0, 90.0, None, False, True),
        (Slo(tpot=0.1), 9.0, 0.1, 90.0, None, False, True),
        (SLO, None, None, 0.9, None, False, True),
        (SLO, None, None, 1.1, None, False, False),
        (SLO, 0.5, 0.1, 5.0, EngineFailed("x"), False, False),
        (SLO, None, None, 0.1, QueueFull("x"), False, False),
        (SLO, None, None, 0.1, InvalidRequest("x"), False, None),
        (SLO, None, None, 0.9, None, True, None),
        (SLO, None, None, 1.1, None, True, False),
        (SLO, 0.5, 0.05, 0.9, None, True, True),
    ],
)
def test_request_is_judged_by_its_times(
    slo: Slo,
    ttft_s: float | None,
    tpot_s: float | None,
    duration_s: float,
    error: ThawError | None,
    has_client_left: bool,
    expected: bool | None,
) -> None:
    assert meets_objective(slo, ttft_s, tpot_s, duration_s, error, has_client_left=has_client_left) is expected


def test_report_is_repeated_until_it_is_acknowledged() -> None:
    counter = ObjectiveCounter("g")
    assert counter.next_report(0.0) is None
    counter.count("a", is_met=True)
    counter.count("a", is_met=False)
    first = counter.next_report(0.0)
    assert first is not None
    assert [(c.model, c.total, c.met) for c in first.counts] == [("a", 2, 1)]
    counter.count("a", is_met=True)
    assert counter.next_report(5.0) == first, "later requests wait for the next number"
    counter.acknowledge(first.number)
    second = counter.next_report(6.0)
    assert second is not None
    assert (second.number, [(c.total, c.met) for c in second.counts]) == (first.number + 1, [(1, 1)])
    counter.acknowledge(second.number)
    assert counter.next_report(7.0) is None


def test_report_that_stays_unacknowledged_is_discarded() -> None:
    counter = ObjectiveCounter("g")
    counter.count("a", is_met=True)
    assert counter.next_report(0.0) is not None
    assert counter.next_report(REPORT_LOST_AFTER_S) is None


def test_reports_are_bounded() -> None:
    counter = ObjectiveCounter("g")
    for n in range(MAX_MODELS_PER_REPORT + 1):
        counter.count(f"m{n}", is_met=True)
    first = counter.next_report(0.0)
    assert first is not None
    assert len(first.counts) == MAX_MODELS_PER_REPORT
    counter.acknowledge(first.number)
    second = counter.next_report(0.0)
    assert second is not None
    assert len(second.counts) == 1


def test_counts_of_a_model_accompany_its_requests() -> None:
    counter = ObjectiveCounter("g")
    assert counter.standing("a") is None
    for number in range(10):
        counter.count("a", is_met=number > 0)
    counter.next_report(0.0)
    standing = counter.standing("a")
    assert standing == ObjectiveStanding(gateway="g", total=10, met=9), "a report does not reset them"
    ticket = Ticket(id="t", model="a", arrived_at=0.0, queue_deadline=1.0, response_timeout_s=60.0, instance_id="i")
    message = encode_infer(ticket, EngineRequest("chat", b"{}"), None, standing)
    assert InferRequest.model_validate_json(message.payload).standing == standing
    for _ in range(5_000):
        counter.count("a", is_met=True)
    latest = counter.standing("a")
    assert latest is not None
    assert latest.total < 1_024
    assert latest.met >= latest.total - 1, "the early miss has little weight"
