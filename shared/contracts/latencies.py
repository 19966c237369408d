"""Latencies of a model's requests in the last hour, which gateways keep and ask each other for.

Times are counted in bins of equal ratio, so that the counts of several gateways add up: bin `i` of
times to the first token has those from 2^(i/8) to 2^((i+1)/8) ms. Bins of phases are the same in
units of 1/1024 ms: a phase of a warm request is often shorter than a millisecond.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.contracts.base import Deadline, Frozen, Message, Request
from shared.contracts.phases import Phase

BINS_PER_DOUBLING = 8
MAX_BIN = 24 * BINS_PER_DOUBLING - 1
"""The last bin also has all times above it, which is more than four hours."""
PHASE_UNITS_PER_MS = 1024
MAX_PHASE_BIN = 34 * BINS_PER_DOUBLING - 1
HISTORY_MINUTES = 60

Bins = dict[int, int]
"""Requests by bin."""


class MinuteLatencies(Frozen):
    """Finished requests of one model in one minute.

    Attributes:
        minute: Minutes since 1970, of the requests' ends.
        warm: Requests by bin of their time to the first token, without those of `cold`.
        cold: The same for requests that waited for a cold start.
        judged: Requests that count for the model's objective.
        met: The part of them that met it.
        phases_ms: Milliseconds on the critical path of the requests of `cold`, by phase.
        warm_phases: Requests of `warm` whose critical path has a phase, by bin of its length.
        cold_phases: The same for `cold`.
    """

    minute: int = Field(ge=0)
    warm: Bins = Field(default_factory=dict, max_length=MAX_BIN + 1)
    cold: Bins = Field(default_factory=dict, max_length=MAX_BIN + 1)
    judged: int = Field(default=0, ge=0)
    met: int = Field(default=0, ge=0)
    phases_ms: dict[Phase, float] = Field(default_factory=dict)
    warm_phases: dict[Phase, Bins] = Field(default_factory=dict)
    cold_phases: dict[Phase, Bins] = Field(default_factory=dict)


class ViewLatencies(Request):
    """Ask every gateway for what it has of a model."""

    deadline_ms: Deadline = 1_000
    kind: Literal["view_latencies"] = "view_latencies"
    model: str


class LatenciesViewed(Message):
    """One gateway's counts of a model, the oldest minute first.

    Minutes without a request are left out.

    Attributes:
        since: First minute that the gateway has counted in full, in minutes since 1970.
    """

    kind: Literal["latencies_viewed"] = "latencies_viewed"
    gateway: str
    since: int = Field(ge=0)
    minutes: tuple[MinuteLatencies, ...] = Field(default=(), max_length=HISTORY_MINUTES + 1)


class TtftSummary(Frozen):
    """Times to the first token, accurate to 5 %; None: there was no request."""

    requests: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None


class PhaseSummary(Frozen):
    """A phase of the time to the first token, accurate to 5 %.

    Attributes:
        requests: Those whose critical path has the phase; the percentiles are among them.
    """

    requests: int
    p50_ms: float
    p99_ms: float


class LatencyPoint(Frozen):
    """Requests that ended in one interval.

    Attributes:
        at: Begin of the interval in Unix seconds.
        phases_ms: Mean milliseconds of each phase on the critical path of a cold request.
        warm_phases: Phases on the critical path of the requests of `warm`.
        cold_phases: The same for `cold`.
    """

    at: int
    warm: TtftSummary = TtftSummary()
    cold: TtftSummary = TtftSummary()
    judged: int = 0
    met: int = 0
    phases_ms: dict[Phase, float] = Field(default_factory=dict)
    warm_phases: dict[Phase, PhaseSummary] = Field(default_factory=dict)
    cold_phases: dict[Phase, PhaseSummary] = Field(default_factory=dict)


class LatencyHistory(Frozen):
    """Latencies of a model in the last hour, by interval: the answer of the admin API.

    Attributes:
        step_s: Length of an interval.
        since: Unix seconds from which on every gateway has counted; earlier points may lack
            requests.
        gateways: Gateways that answered.
        points: All intervals of the hour, the oldest first; the last one is not over.
        whole: The hour as one interval.
    """

    model: str
    step_s: int
    since: int
    gateways: int
    points: tuple[LatencyPoint, ...]
    whole: LatencyPoint
