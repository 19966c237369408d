"""Records of migrations that are larger than a NATS message."""

from __future__ import annotations

from services.migrator.domain.record_size import count_bytes, fit_record, refuse_record
from shared.contracts.migration import MigrationRecord, MigrationRound, MovedRequest
from shared.errors import MigrationFailed
from tests.unit.migrator.records import record

LIMIT = 20_000


def with_requests(count: int, reason: str = "", rounds: int = 0) -> MigrationRecord:
    requests = tuple(MovedRequest(request_id=f"q-{n}", outcome="failed", reason=reason) for n in range(count))
    made = tuple(MigrationRound(request_id="q-1", number=n, tokens=1, took_ms=1.0, gap=1) for n in range(rounds))
    return record(1, requests=requests, rounds=made)


def test_record_that_fits_stays_as_it_is() -> None:
    whole = with_requests(3, "x" * 1000, rounds=5)
    assert fit_record(whole, LIMIT) is whole


def test_oldest_rounds_are_left_out_first() -> None:
    whole = with_requests(3, "x" * 1000, rounds=400)
    fitting = fit_record(whole, LIMIT)
    assert fitting is not None
    assert count_bytes(fitting) <= LIMIT
    assert 0 < len(fitting.rounds) < 400
    assert fitting.rounds == whole.rounds[-len(fitting.rounds) :]
    assert fitting.requests == whole.requests


def test_long_reasons_are_shortened_then() -> None:
    whole = with_requests(30, "é" * 5000, rounds=10).model_copy(update={"error": MigrationFailed("y" * 50_000).body()})
    fitting = fit_record(whole, LIMIT)
    assert fitting is not None
    assert count_bytes(fitting) <= LIMIT
    assert not fitting.rounds
    assert [m.outcome for m in fitting.requests] == ["failed"] * 30
    assert fitting.requests[0].reason == "é" * 100


def test_outcomes_that_do_not_fit_end_the_migration_with_an_error() -> None:
    whole = with_requests(1000, "x")
    assert fit_record(whole, LIMIT) is None
    refused = refuse_record(whole, LIMIT)
    assert count_bytes(refused) <= LIMIT
    assert refused.over
    assert refused.error is not None
    assert refused.error.code == "payload_too_large"
    assert "1000 requests" in refused.error.message
