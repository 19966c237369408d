"""Trace migrations, linked to their requests' traces, and count them in metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from wsgiref.simple_server import WSGIServer

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode
from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from shared.contracts.migration import MigrationRecord
from shared.telemetry.series import Counter, Histogram
from shared.telemetry.tracing import context_of, link_to, traceparent, tracer

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60)
TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._pause = self._seconds("thaw.migration.pause", "From the last token of the source to the first of the destination.")
        self._duration = self._seconds("thaw.migration.duration", "Duration of a migration.")
        self._rounds = self._counter("thaw.migration.rounds", "Recomputations at destinations.")
        self._recomputed = self._counter("thaw.migration.tokens", "Tokens recomputed at destinations.")
        self._kv_bytes = self._counter("thaw.migration.kv_bytes", "Keys and values that sources sent to destinations.")
        self._kv_tokens = self._counter("thaw.migration.kv_tokens", "Tokens whose keys and values were sent instead of recomputed.")
        self._moved = self._counter("thaw.migration.moved_tokens", "Tokens that requests had generated when they were moved.")
        self._requests = self._counter("thaw.migration.requests", "Requests by the outcome of their move.")
        self._ended = self._counter("thaw.migrations", "Migrations by outcome and reason.")
        self._server: WSGIServer | None = None

    def _seconds(self, name: str, text: str) -> Histogram:
        histogram = Histogram(name, text, "seconds", SECONDS)
        self._registry.register(histogram)
        return histogram

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(name, text)
        self._registry.register(counter)
        return counter

    def serve(self, host: str, port: int) -> None:
        """Serve metrics. Raises `OSError` if the port cannot be bound."""
        self._server, _ = start_http_server(port, host, registry=self._registry)

    def record(self, record: MigrationRecord) -> None:
        names = {"gen_ai.request.model": record.model, "thaw.reason": record.reason or "operator"}
        self._ended.add(1, names | {"thaw.outcome": record.state})
        if record.duration_ms is not None:
            self._duration.record(record.duration_ms / 1e3, names)
        self._rounds.add(len(record.rounds), names)
        self._recomputed.add(sum(r.tokens for r in record.rounds), names)
        self._kv_bytes.add(sum(r.kv_bytes for r in record.rounds), names)
        self._kv_tokens.add(sum(r.kv_tokens for r in record.rounds), names)
        self._moved.add(sum(m.tokens for m in record.requests if m.outcome == "moved"), names)
        for moved in record.requests:
            self._requests.add(1, names | {"thaw.outcome": moved.outcome})
            if moved.pause_ms is not None:
                self._pause.record(moved.pause_ms / 1e3, names)

    def render(self) -> str:
        text: str = generate_latest(self._registry).decode()
        return text

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class MigrationSpan:
    """The span of one migration by this owner.

    A later owner's span belongs to the same trace.
    """

    def __init__(self, record: MigrationRecord) -> None:
        self._began = time.time_ns()
        self.span: Span = tracer.start_span(
            f"migrate {record.model}",
            context=context_of(record.traceparent),
            attributes={
                "gen_ai.request.model": record.model,
                "thaw.migration_id": record.migration_id,
                "thaw.source": record.source_instance,
                "thaw.destination": record.instance_id,
                "thaw.reason": record.reason,
            },
            start_time=self._began,
        )
        self.traceparent = record.traceparent or traceparent(self.span)
        self._recorded_rounds = len(record.rounds)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the trace current: messages sent meanwhile carry it."""
        token = otel_context.attach(trace.set_span_in_context(self.span))
        try:
            yield
        finally:
            otel_context.detach(token)

    def link(self, parent: str) -> None:
        found = link_to(parent)
        if found is not None:
            self.span.add_link(found.context)

    def end(self, record: MigrationRecord, *, lost: bool) -> None:
        parent = trace.set_span_in_context(self.span, Context())
        for r in record.rounds[self._recorded_rounds :]:
            start = self._began + int(r.start_ms * 1e6)
            attributes: dict[str, str | int] = {
                "thaw.request_id": r.request_id,
                "thaw.round": r.number,
                "thaw.tokens": r.tokens,
                "thaw.gap": r.gap,
                "thaw.kv_tokens": r.kv_tokens,
                "thaw.kv_bytes": r.kv_bytes,
            }
            if r.kv_reason:
                attributes["thaw.kv_reason"] = r.kv_reason
            tracer.start_span("round", context=parent, attributes=attributes, start_time=start).end(start + int(r.took_ms * 1e6))
        for m in record.requests:
            self.span.add_event(m.outcome, {"thaw.request_id": m.request_id, "thaw.pause_ms": m.pause_ms or 0.0})
        self.span.set_attribute("thaw.outcome", "lost" if lost else record.state)
        if not lost and record.error is not None:
            self.span.set_status(Status(StatusCode.ERROR, record.error.message))
        self.span.end()
