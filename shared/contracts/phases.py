"""Named parts of a cold start, and how they are measured and reported."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from pydantic import Field

from shared.contracts.base import Frozen


class Phase(StrEnum):
    """The map's words for the parts of a TTFT."""

    QUEUE = "queue"  # waiting in the gateway or in the engine for a slot
    SCHEDULE = "schedule"  # demand received → plan persisted and sent
    RESERVE = "reserve"  # waiting for device memory, victims leaving included
    CONTAINER = "container"  # engine process or container made
    ATTACH = "attach"  # a running executor takes the instance
    CONTEXT = "context"  # device context
    LIBRARIES = "libraries"  # imports
    COMPILE = "compile"
    CAPTURE = "capture"
    FETCH = "fetch"  # remote → local disk
    LOAD = "load"  # disk or host memory → memory the engine computes from
    INIT = "init"  # modules built, tensors bound, tokenizer read
    RESTORE = "restore"
    PROFILE = "profile"  # warm-up and probe
    PREFILL = "prefill"
    MESH = "mesh"  # messages on their way, and what no process claimed


NEW_ZYGOTE = "new zygote"
"""`launcher` of a container phase that a zygote's own start may be part of: it says nothing of the
next one.
"""


class PhaseSpan(Frozen):
    """One measured phase.

    Times are milliseconds on the measuring process's monotonic clock, relative to the origin that
    the enclosing message names; they are never compared with another host's clock.
    """

    phase: Phase
    start_ms: float
    duration_ms: float = Field(ge=0)
    process: str = ""
    detail: dict[str, str | int | float] = Field(default_factory=dict)

    @property
    def end_ms(self) -> float:
        return self.start_ms + self.duration_ms


def measure_covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end): spans that overlap count once."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            length += end - max(start, reached)
            reached = end
    return length
