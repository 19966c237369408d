"""What a request leaves behind: metrics, the end of its span, and a trace record published off the request path."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field

from nats.errors import Error as NatsError
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

from services.gateway.requests.active_request import Exchange
from services.gateway.requests.handoff_history import Handover
from services.gateway.telemetry.metrics import Metrics
from shared.contracts import subjects
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.traces import CriticalSegment, HandoverTrace, RequestTrace
from shared.messaging import Mesh
from shared.messaging.streams import ensure_trace_stream
from shared.telemetry.critical_path import critical_path
from shared.telemetry.timeline import Timeline
from shared.telemetry.tracing import link_to, record_phases, trace_id

log = logging.getLogger(__name__)
_BACKLOG = 1_000
OWN = "gateway"
CLIENT_CLOSED = 499
"""nginx's status for a client that left before its answer; no client ever sees it."""


@dataclass(frozen=True)
class Origin:
    """Where a request came from, for its record: `received` in Unix seconds, for people."""

    request_id: str
    span: Span
    arrived: float
    received: float = field(default_factory=time.time)
    client_request_id: str | None = None
    """The client's own name for it, which nothing is looked up by."""


def spans_of(exchange: Exchange) -> tuple[PhaseSpan, ...]:
    """Every phase known of the request, in milliseconds since it arrived; those of its model's start are clipped by the critical path."""
    timeline = Timeline(OWN)
    ticket = exchange.ticket
    if ticket.attempts:
        # A cold request waited for the start's own phases; only what it waited after that was for a slot.
        timeline.add(Phase.QUEUE, exchange.cold_ready_at or ticket.arrived, exchange.sent_at)
    for heard in exchange.heard:
        timeline.absorb(heard.phases, heard.at)
    return timeline.spans(ticket.arrived)


def critical_of(exchange: Exchange, spans: tuple[PhaseSpan, ...]) -> tuple[CriticalSegment, ...]:
    if exchange.first_at is None:
        return ()
    return critical_path(spans, 0.0, (exchange.first_at - exchange.ticket.arrived) * 1e3)


def server_timing(exchange: Exchange) -> str:
    """The critical path as a Server-Timing value: milliseconds by phase, in order of first appearance."""
    totals: dict[str, float] = {}
    for segment in critical_of(exchange, spans_of(exchange)):
        totals[segment.phase.value] = totals.get(segment.phase.value, 0.0) + segment.duration_ms
    return ", ".join(f"{phase};dur={ms:.1f}" for phase, ms in totals.items())


def _told(handover: Handover, arrived: float) -> HandoverTrace:
    return HandoverTrace(
        kind=handover.kind,
        source_instance=handover.source,
        instance_id=handover.to,
        at_ms=(handover.at - arrived) * 1e3,
        since_ms=(handover.since - arrived) * 1e3 if handover.since is not None else None,
        tokens=handover.tokens,
        pause_ms=handover.pause_ms,
        migration_id=handover.migration_id,
    )


class Recorder:
    """Keeps at most a thousand unsent traces; beyond, the oldest is dropped and counted."""

    def __init__(self, mesh: Mesh, metrics: Metrics) -> None:
        self._mesh = mesh
        self.metrics = metrics
        self._queue: asyncio.Queue[RequestTrace] = asyncio.Queue(_BACKLOG)
        self.dropped = 0

    def record(self, exchange: Exchange, origin: Origin) -> None:
        ended = time.monotonic()
        error = exchange.error
        answered = exchange.relay.head.status if exchange.relay is not None else 200
        status = CLIENT_CLOSED if exchange.gone else error.status if error else answered
        self.metrics.record(exchange, status, ended)
        spans = spans_of(exchange)
        # Others export their own phases; what the gateway measured is the wait in its queue.
        own = [
            s.model_copy(update={"start_ms": s.start_ms - (ended - exchange.ticket.arrived) * 1e3})
            for s in spans
            if s.process == OWN
        ]
        record_phases(own, set_span_in_context(origin.span))
        self._end_span(exchange, origin, status)
        if self._queue.full():
            self._queue.get_nowait()
            self._queue.task_done()
            self.dropped += 1
        trace = self._trace(exchange, origin, spans, status, ended)
        self._queue.put_nowait(trace)
        log.info(
            "answered",
            extra={
                "model": trace.model,
                "endpoint": trace.endpoint,
                "status": status,
                "error": exchange.error.code if exchange.error else None,
                "cold": trace.cold,
                "ttft_ms": round(trace.ttft_ms, 1) if trace.ttft_ms is not None else None,
                "duration_ms": round(trace.duration_ms, 1),
                "trace_id": trace.trace_id,
                "client_request_id": origin.client_request_id,
            },
        )

    def _end_span(self, exchange: Exchange, origin: Origin, status: int) -> None:
        span, usage = origin.span, exchange.usage
        span.set_attributes(
            {
                "gen_ai.request.model": exchange.ticket.model,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "http.response.status_code": status,
                "thaw.instance": exchange.ticket.instance_id or "",
                "thaw.cold": exchange.cold_ready_at is not None,
                "thaw.request_id": origin.request_id,
            }
        )
        if origin.client_request_id is not None:
            span.set_attribute("thaw.client_request_id", origin.client_request_id)
        load = link_to(exchange.instance.traceparent) if exchange.instance is not None and exchange.cold_ready_at else None
        if load is not None:
            span.add_link(load.context, {"thaw.link": "model load"})
        for handover in exchange.handovers:
            told: dict[str, str | float] = {"thaw.from": handover.source, "thaw.to": handover.to, "thaw.tokens": handover.tokens}
            span.add_event(handover.kind, told | ({"thaw.pause_ms": handover.pause_ms} if handover.pause_ms is not None else {}))
            if handover.link is not None:
                span.add_link(handover.link, {"thaw.link": "migration", "thaw.migration": handover.migration_id or ""})
        if exchange.error is not None:
            span.set_attribute("error.type", exchange.error.code)
            span.set_status(Status(StatusCode.ERROR, exchange.error.message))
        span.end()

    def _trace(self, exchange: Exchange, origin: Origin, spans: tuple[PhaseSpan, ...], status: int, ended: float) -> RequestTrace:
        ticket, instance = exchange.ticket, exchange.instance
        cold = exchange.cold_ready_at is not None
        load = link_to(instance.traceparent) if instance is not None and cold else None
        return RequestTrace(
            request_id=origin.request_id,
            ticket_id=exchange.ticket.id,
            trace_id=trace_id(origin.span),
            model=ticket.model,
            endpoint=exchange.ask.endpoint,
            received=origin.received,
            instance_id=ticket.instance_id,
            cold=cold,
            load_plan_id=instance.plan_id if instance is not None and cold else None,
            load_trace_id=format(load.context.trace_id, "032x") if load is not None else None,
            status=status,
            error=exchange.error.message if exchange.error else None,
            ttft_ms=(exchange.first_at - ticket.arrived) * 1e3 if exchange.first_at is not None else None,
            duration_ms=(ended - ticket.arrived) * 1e3,
            prompt_tokens=exchange.usage.prompt_tokens,
            completion_tokens=exchange.usage.completion_tokens,
            spans=spans,
            critical_path=critical_of(exchange, spans),
            handovers=tuple(_told(h, ticket.arrived) for h in exchange.handovers),
        )

    async def run(self) -> None:
        """Publish traces until cancelled. A trace that cannot be stored is lost, never a request."""
        ensured = False
        while True:
            trace = await self._queue.get()
            try:
                js = self._mesh.nc.jetstream(timeout=2)
                if not ensured:
                    await ensure_trace_stream(js, self._mesh.replicas)
                    ensured = True
                await js.publish(subjects.request_trace(trace.request_id), trace.model_dump_json().encode())
            except (NatsError, TimeoutError) as e:
                ensured = False
                self.dropped += 1
                log.info("a trace could not be stored", extra={"error": repr(e), "dropped": self.dropped})
            finally:
                self._queue.task_done()

    async def flush(self, within: float) -> None:
        """Wait until what has been recorded is stored, or `within` seconds are over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._queue.join()
