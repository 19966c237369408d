"""Traces of requests and of model loads, as `thaw trace` shows them.

A bounded JetStream stream has one record for each request and each load. They are written when the
response or the load has ended, so that no request waits for them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationError

from shared.contracts.base import Frozen, Message
from shared.contracts.phases import Phase, PhaseSpan

TRACE_MAX_AGE_S = 7 * 24 * 3600
"""Seconds after which the stream drops a trace."""
TRACE_MAX_COUNT = 10_000
"""Traces that the stream keeps; it drops the oldest ones first."""


class CriticalSegment(Frozen):
    """A stretch of the critical path: the phase that the request waited for.

    The stretch covers [start_ms, start_ms + duration_ms).
    """

    phase: Phase
    start_ms: float
    duration_ms: float = Field(ge=0)


class HandoverTrace(Frozen):
    """A hand-off of the request from one instance to another.

    Times are as in `RequestTrace`.
    """

    kind: Literal["move", "failover"] = Field(description="move: both instances ran; failover: the source was lost.")
    source_instance: str
    instance_id: str = Field(description="The destination.")
    at_ms: float = Field(description="When the gateway sent the request to the destination.")
    since_ms: float | None = Field(default=None, description="When the source's last token arrived; None: none had arrived.")
    tokens: int = Field(description="Tokens of the response that the destination continued from; 0: it restarted.")
    pause_ms: float | None = Field(
        default=None, description="From the source's last token to the destination's first one; None: no token arrived from there."
    )
    migration_id: str | None = None


class RequestTrace(Message):
    """The trace of one request.

    Times are milliseconds on the gateway's clock since the gateway received the request.
    `critical_path` tiles [0, ttft_ms].
    """

    kind: Literal["request_trace"] = "request_trace"
    request_id: str
    trace_id: str
    model: str
    endpoint: str
    received: float = Field(description="Unix seconds by the gateway's wall clock.")
    ticket_id: str = Field(
        default="", description="The request's id between gateway and engines. Each attempt appends a number to it."
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
    handovers: tuple[HandoverTrace, ...] = ()

    @property
    def phases_ms(self) -> dict[Phase, float]:
        """The time to the first token in milliseconds, by phase: the sums of `critical_path`."""
        found: dict[Phase, float] = {}
        for segment in self.critical_path:
            found[segment.phase] = found.get(segment.phase, 0.0) + segment.duration_ms
        return found


def parse_trace(data: bytes | None) -> RequestTrace | None:
    """Return the trace of a record; None if a newer version wrote it in a form not known here."""
    try:
        return RequestTrace.model_validate_json(data or b"null")
    except ValidationError:
        return None


class TracePage(Frozen):
    """Traces of requests in the order in which they were written."""

    traces: tuple[RequestTrace, ...] = ()
    next: int | None = Field(default=None, description="Where the next page begins; None: no trace follows yet.")


class LoadTrace(Message):
    """One start of an instance.

    Times are milliseconds since the scheduler received the demand.
    """

    kind: Literal["load_trace"] = "load_trace"
    plan_id: str
    trace_id: str
    model: str
    node: str
    instance_id: str
    created: float = Field(description="Unix seconds of its plan.")
    duration_ms: float
    outcome: Literal["ready", "failed", "cancelled"]
    spans: tuple[PhaseSpan, ...] = ()
    critical_path: tuple[CriticalSegment, ...] = ()
    waiters: tuple[str, ...] = Field(default=(), description="Trace ids of the requests that waited for it (at most 32).")
