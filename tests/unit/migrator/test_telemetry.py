"""A migration's trace and metrics.

The trace is separate, linked with its requests', and continued by a later owner.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.migrator.adapters import telemetry
from services.migrator.adapters.telemetry import Metrics, MigrationSpan
from shared.contracts.migration import MigrationRecord, MigrationRound, MovedRequest
from shared.telemetry.ids import SystemIds
from shared.telemetry.tracing import carry
from tests.unit.migrator.records import record

REQUEST = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(id_generator=SystemIds())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def ended(first: MigrationRecord) -> MigrationRecord:
    return first.model_copy(
        update={
            "state": "done",
            "duration_ms": 500.0,
            "rounds": (MigrationRound(request_id="q-1", number=1, tokens=100, took_ms=20.0, gap=3, start_ms=5.0),),
            "requests": (
                MovedRequest(request_id="q-1", outcome="moved", tokens=70, pause_ms=25.0),
                MovedRequest(request_id="p-1", outcome="fixed"),
            ),
        }
    )


def named(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    (found,) = [s for s in spans.get_finished_spans() if s.name == name]
    return found


def test_rounds_are_spans_of_a_linked_trace(spans: InMemorySpanExporter) -> None:
    span = MigrationSpan(record(1))
    with span.current():
        assert carry()["traceparent"] == span.traceparent
    assert trace.get_current_span() is not span.span
    span.link(REQUEST)
    span.end(ended(record(1)), lost=False)
    whole, made = named(spans, "migrate m"), named(spans, "round")
    assert [format(link.context.trace_id, "032x") for link in whole.links] == ["a" * 32]
    assert whole.attributes is not None
    assert whole.attributes["thaw.outcome"] == "done"
    assert made.parent is not None
    assert made.parent.span_id == whole.context.span_id
    assert made.attributes is not None
    assert (made.attributes["thaw.tokens"], made.attributes["thaw.gap"]) == (100, 3)
    assert made.start_time is not None
    assert made.end_time is not None
    assert made.end_time - made.start_time == 20_000_000


def test_later_owner_continues_the_trace_and_exports_only_its_own_rounds(spans: InMemorySpanExporter) -> None:
    first = MigrationSpan(record(1))
    taken = ended(record(1)).model_copy(update={"traceparent": first.traceparent})
    second = MigrationSpan(taken)
    assert second.traceparent == first.traceparent
    second.end(taken, lost=False)
    first.end(record(1), lost=True)
    assert {s.name for s in spans.get_finished_spans()} == {"migrate m"}
    assert len({s.context.trace_id for s in spans.get_finished_spans()}) == 1


def test_metrics_are_labelled_by_outcome() -> None:
    metrics = Metrics()
    try:
        metrics.record(ended(record(1)))
        text = metrics.render()
    finally:
        metrics.close()
    labels = 'gen_ai_request_model="m",thaw_outcome="fixed",thaw_reason="operator"'
    assert f"thaw_migration_requests_total{{{labels}}} 1.0" in text
    assert 'thaw_migration_pause_seconds_sum{gen_ai_request_model="m",thaw_reason="operator"} 0.025' in text
    assert 'thaw_migration_tokens_total{gen_ai_request_model="m",thaw_reason="operator"} 100.0' in text
    assert 'thaw_migration_moved_tokens_total{gen_ai_request_model="m",thaw_reason="operator"} 70.0' in text
    assert 'thaw_migration_rounds_total{gen_ai_request_model="m",thaw_reason="operator"} 1.0' in text
    assert 'thaw_migrations_total{gen_ai_request_model="m",thaw_outcome="done",thaw_reason="operator"} 1.0' in text
    assert "thaw_migration_duration_seconds_sum" in text


def test_migrations_of_each_of_many_models_have_rows() -> None:
    """OpenTelemetry's instruments keep 2,000 sets of labels."""
    metrics = Metrics()
    for number in range(2_100):
        metrics.record(ended(record(1)).model_copy(update={"model": f"m{number}"}))
    lines = metrics.render().splitlines()
    for metric in ("thaw_migration_pause_seconds_count", "thaw_migrations_total"):
        assert sum(line.startswith(f"{metric}{{") for line in lines) == 2_100
