"""Set up OpenTelemetry tracing, propagate W3C context over NATS, and make spans.

Spans are made from measured phases.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import default_setter
from opentelemetry.trace import Link, Span, SpanContext, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.contracts.phases import PhaseSpan

if TYPE_CHECKING:
    from shared.settings import CommonSettings

_W3C = TraceContextTextMapPropagator()
tracer = trace.get_tracer("thaw")


def setup_tracing(settings: CommonSettings, service: str) -> None:
    """Install the process's tracer provider.

    Without an OTLP endpoint spans get ids (for logs and `thaw trace`) and go nowhere.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

    from shared.telemetry.ids import SystemIds

    resource = Resource.create({"service.name": f"thaw-{service}"})
    provider = TracerProvider(resource=resource, id_generator=SystemIds())
    if settings.otlp_endpoint:
        exporter: SpanExporter
        if settings.otlp_protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

            exporter = Grpc(endpoint=settings.otlp_endpoint, insecure=settings.otlp_endpoint.startswith("http://"))
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

            exporter = Http(endpoint=f"{settings.otlp_endpoint.rstrip('/')}/v1/traces")
        provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def shutdown_tracing() -> None:
    """Export what is still buffered."""
    provider = trace.get_tracer_provider()
    shutdown = getattr(provider, "shutdown", None)
    if shutdown is not None:
        shutdown()


def carry() -> dict[str, str]:
    """Headers that carry the current trace context."""
    headers: dict[str, str] = {}
    _W3C.inject(headers, setter=default_setter)
    return headers


@contextmanager
def carried(headers: Mapping[str, str] | None) -> Iterator[None]:
    """Run under the trace context that `headers` carry, if any."""
    if not headers or "traceparent" not in headers:
        yield
        return
    attached = otel_context.attach(_W3C.extract(dict(headers)))
    try:
        yield
    finally:
        otel_context.detach(attached)


def traceparent(span: Span) -> str | None:
    """`span` as a W3C traceparent; None if it is not recording anything."""
    headers: dict[str, str] = {}
    _W3C.inject(headers, context=trace.set_span_in_context(span))
    return headers.get("traceparent")


def context_of(parent: str | None) -> Context:
    """The context a traceparent names; an empty one (a new root) for None or nonsense."""
    return _W3C.extract({"traceparent": parent}, context=Context()) if parent else Context()


def link_to(parent: str | None) -> Link | None:
    """A link to the span that a traceparent names."""
    found: SpanContext = trace.get_current_span(context_of(parent)).get_span_context()
    return Link(found) if found.is_valid else None


def trace_id(span: Span) -> str:
    return format(span.get_span_context().trace_id, "032x")


def record_phases(spans: Iterable[PhaseSpan], parent: Context, now_ns: int | None = None) -> None:
    """Export measured phases (relative to now) as child spans.

    Each process exports only its own phases, so that none is exported twice.
    """
    base = time.time_ns() if now_ns is None else now_ns
    for s in spans:
        start = base + int(s.start_ms * 1e6)
        attributes: dict[str, str | int | float] = {f"thaw.{k}": v for k, v in s.detail.items()}
        span = tracer.start_span(s.phase.value, context=parent, kind=SpanKind.INTERNAL, attributes=attributes, start_time=start)
        span.end(start + int(s.duration_ms * 1e6))
