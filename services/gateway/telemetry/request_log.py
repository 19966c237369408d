"""Records of finished requests: metrics, span, log entry, and trace.

Traces are published in the background, off the request path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field

from nats.errors import Error as NatsError
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

from services.gateway.domain.caller import ANONYMOUS, Caller
from services.gateway.requests.active_request import ActiveRequest
from services.gateway.requests.handoff import HandoffRecord
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
_MAX_PENDING = 1_000
PROCESS = "gateway"
CLIENT_CLOSED = 499
"""nginx's status for a client that disconnected; no client ever receives it."""


@dataclass(frozen=True)
class RequestOrigin:
    """The origin of a request.

    Attributes:
        arrived_at: Monotonic time.
        received_at: Unix time, for people.
        client_request_id: The client's own id; nothing is looked up by it.
        caller: Who sent it.
        cost: Its predicted size in tokens, divided by the weight of its key.
        priority: Higher ones are served first.
    """

    request_id: str
    span: Span
    arrived_at: float
    received_at: float = field(default_factory=time.time)
    client_request_id: str | None = None
    caller: Caller = ANONYMOUS
    cost: float = 1.0
    priority: int = 0


def phase_spans(request: ActiveRequest) -> tuple[PhaseSpan, ...]:
    """Collect all phases of a request, in milliseconds since its arrival.

    Phases of the model's start may begin earlier; the critical path clips them.
    """
    timeline, stats, ticket = Timeline(PROCESS), request.stats, request.ticket
    if ticket.attempts:
        # A cold request waited for the phases of the start; it queued for a slot only after that.
        timeline.add(Phase.QUEUE, stats.cold_ready_at or ticket.arrived_at, stats.sent_at)
    for report in stats.phase_reports:
        timeline.absorb(report.phases, report.received_at)
    return timeline.spans(ticket.arrived_at)


def critical_segments(request: ActiveRequest, spans: tuple[PhaseSpan, ...]) -> tuple[CriticalSegment, ...]:
    """Compute the critical path of the time to first token."""
    first_token_at = request.stats.first_token_at
    if first_token_at is None:
        return ()
    return critical_path(spans, 0.0, (first_token_at - request.ticket.arrived_at) * 1e3)


def server_timing(request: ActiveRequest) -> str:
    """Format the critical path as a Server-Timing value: milliseconds per phase."""
    totals: dict[str, float] = {}
    for segment in critical_segments(request, phase_spans(request)):
        totals[segment.phase.value] = totals.get(segment.phase.value, 0.0) + segment.duration_ms
    return ", ".join(f"{phase};dur={ms:.1f}" for phase, ms in totals.items())


def _handover_trace(record: HandoffRecord, arrived_at: float) -> HandoverTrace:
    last_output_at = record.last_output_at
    return HandoverTrace(
        kind=record.kind,
        source_instance=record.source,
        instance_id=record.destination,
        at_ms=(record.started_at - arrived_at) * 1e3,
        since_ms=(last_output_at - arrived_at) * 1e3 if last_output_at is not None else None,
        tokens=record.tokens,
        pause_ms=record.pause_ms,
        migration_id=record.migration_id,
    )


def _status(request: ActiveRequest) -> int:
    completion, passthrough = request.completion, request.response.passthrough
    if completion.has_client_left:
        return CLIENT_CLOSED
    if completion.error is not None:
        return completion.error.status
    return passthrough.head.status if passthrough is not None else 200


class RequestLog:
    """Record finished requests. Of unpublished traces it keeps the latest thousand.

    Attributes:
        dropped: Number of traces that were not published.
    """

    def __init__(self, mesh: Mesh, metrics: Metrics) -> None:
        self.metrics = metrics
        self.dropped = 0
        self._mesh = mesh
        self._queue: asyncio.Queue[RequestTrace] = asyncio.Queue(_MAX_PENDING)

    def record(self, request: ActiveRequest, origin: RequestOrigin) -> RequestTrace:
        """Record a finished request, and return its trace."""
        now, error, status = time.monotonic(), request.completion.error, _status(request)
        self.metrics.record(request, status, now)
        if error is not None and request.response.has_late_error:
            self.metrics.record_rejection(error, origin.caller.name)
        spans = phase_spans(request)
        # Other processes export their own phases; the gateway exports its queue.
        age_ms = (now - request.ticket.arrived_at) * 1e3
        own = [s.model_copy(update={"start_ms": s.start_ms - age_ms}) for s in spans if s.process == PROCESS]
        record_phases(own, set_span_in_context(origin.span))
        self._end_span(request, origin, status)
        trace = self._trace(request, origin, spans, status, now)
        self.metrics.record_ttft(trace, is_sampled=origin.span.get_span_context().trace_flags.sampled)
        self._enqueue(trace)
        log.info(
            "request finished",
            extra={
                "model": trace.model,
                "endpoint": trace.endpoint,
                "status": status,
                "error": error.code if error else None,
                "cold": trace.cold,
                "ttft_ms": round(trace.ttft_ms, 1) if trace.ttft_ms is not None else None,
                "duration_ms": round(trace.duration_ms, 1),
                "trace_id": trace.trace_id,
                "client_request_id": origin.client_request_id,
                "key": origin.caller.name or None,
            },
        )
        return trace

    def _enqueue(self, trace: RequestTrace) -> None:
        """Queue a trace for publication; drop the oldest if the queue is full."""
        if self._queue.full():
            self._queue.get_nowait()
            self._queue.task_done()
            self.dropped += 1
        self._queue.put_nowait(trace)

    def _end_span(self, request: ActiveRequest, origin: RequestOrigin, status: int) -> None:
        span, stats, error = origin.span, request.stats, request.completion.error
        is_cold = stats.cold_ready_at is not None
        span.set_attributes(
            {
                "gen_ai.request.model": request.ticket.model,
                "gen_ai.usage.input_tokens": stats.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": stats.usage.completion_tokens,
                "http.response.status_code": status,
                "thaw.instance": request.ticket.instance_id or "",
                "thaw.cold": is_cold,
                "thaw.request_id": origin.request_id,
            }
        )
        if origin.client_request_id is not None:
            span.set_attribute("thaw.client_request_id", origin.client_request_id)
        load = link_to(stats.instance.traceparent) if stats.instance is not None and is_cold else None
        if load is not None:
            span.add_link(load.context, {"thaw.link": "model load"})
        for record in request.handoffs:
            attributes: dict[str, str | float] = {
                "thaw.from": record.source,
                "thaw.to": record.destination,
                "thaw.tokens": record.tokens,
            }
            if record.pause_ms is not None:
                attributes["thaw.pause_ms"] = record.pause_ms
            span.add_event(record.kind, attributes)
            if record.link is not None:
                span.add_link(record.link, {"thaw.link": "migration", "thaw.migration": record.migration_id or ""})
        if error is not None:
            span.set_attribute("error.type", error.code)
            span.set_status(Status(StatusCode.ERROR, error.message))
        span.end()

    def _trace(
        self, request: ActiveRequest, origin: RequestOrigin, spans: tuple[PhaseSpan, ...], status: int, now: float
    ) -> RequestTrace:
        ticket, stats, error = request.ticket, request.stats, request.completion.error
        # The start of the instance, if the request waited for it.
        start = stats.instance if stats.cold_ready_at is not None else None
        load = link_to(start.traceparent) if start is not None else None
        ttft_s = stats.first_token_at - ticket.arrived_at if stats.first_token_at is not None else None
        return RequestTrace(
            request_id=origin.request_id,
            ticket_id=ticket.id,
            trace_id=trace_id(origin.span),
            model=ticket.model,
            endpoint=request.engine_request.endpoint,
            received=origin.received_at,
            instance_id=ticket.instance_id,
            cold=stats.cold_ready_at is not None,
            load_plan_id=start.plan_id if start is not None else None,
            load_trace_id=format(load.context.trace_id, "032x") if load is not None else None,
            status=status,
            error=error.message if error else None,
            ttft_ms=ttft_s * 1e3 if ttft_s is not None else None,
            duration_ms=(now - ticket.arrived_at) * 1e3,
            prompt_tokens=stats.usage.prompt_tokens,
            completion_tokens=stats.usage.completion_tokens,
            spans=spans,
            critical_path=critical_segments(request, spans),
            handovers=tuple(_handover_trace(r, ticket.arrived_at) for r in request.handoffs),
        )

    async def run(self) -> None:
        """Publish traces until cancelled. One that cannot be stored is dropped."""
        has_stream = False
        while True:
            trace = await self._queue.get()
            try:
                js = self._mesh.nc.jetstream(timeout=2)
                if not has_stream:
                    await ensure_trace_stream(js, self._mesh.replicas)
                    has_stream = True
                await js.publish(subjects.request_trace(trace.request_id), trace.model_dump_json().encode())
            except (NatsError, TimeoutError) as e:
                has_stream = False
                self.dropped += 1
                log.info("failed to store a trace", extra={"error": repr(e), "dropped": self.dropped})
            finally:
                self._queue.task_done()

    async def flush(self, timeout_s: float) -> None:
        """Wait until all recorded traces are stored, for `timeout_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._queue.join()
