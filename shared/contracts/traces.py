"""What `thaw trace` shows: one record per request and per model load, in a bounded JetStream stream, written off the request path."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.contracts.base import Frozen, Message
from shared.contracts.phases import Phase, PhaseSpan

TRACE_MAX_AGE_S = 7 * 24 * 3600
TRACE_MAX_COUNT = 10_000


class CriticalSegment(Frozen):
    """One stretch of the critical path: the phase that was waited for in [start_ms, start_ms + duration_ms)."""

    phase: Phase
    start_ms: float
    duration_ms: float = Field(ge=0)


class RequestTrace(Message):
    """Times are milliseconds since the gateway had received the request, on the gateway's clock. `critical_path` tiles [0, ttft_ms]."""

    kind: Literal["request_trace"] = "request_trace"
    request_id: str
    trace_id: str
    model: str
    endpoint: str
    received: float = Field(description="Unix seconds, for people.")
    ticket_id: str = Field(
        default="", description="Its name between gateways and engines; those of its attempts have a number behind it."
    )
    instance_id: str | None = None
    cold: bool = False
    load_plan_id: str | None = None
    load_trace_id: str | None = None
    status: int = 200
    error: str | None = None
    ttft_ms: float | None = None
    duration_ms: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    spans: tuple[PhaseSpan, ...] = ()
    critical_path: tuple[CriticalSegment, ...] = ()


class TracePage(Frozen):
    """Traces of requests in the order in which they were written. `next`: where the next page begins; None: there is none yet."""

    traces: tuple[RequestTrace, ...] = ()
    next: int | None = None


class LoadTrace(Message):
    """One start of an instance. Times are milliseconds since the scheduler heard the demand."""

    kind: Literal["load_trace"] = "load_trace"
    plan_id: str
    trace_id: str
    model: str
    node: str
    instance_id: str
    created: float
    duration_ms: float
    outcome: Literal["ready", "failed", "cancelled"]
    spans: tuple[PhaseSpan, ...] = ()
    critical_path: tuple[CriticalSegment, ...] = ()
    waiters: tuple[str, ...] = Field(default=(), description="Trace ids of the requests that asked for it (at most 32).")
