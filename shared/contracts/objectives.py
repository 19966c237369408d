"""Gateways report to the scheduler how many requests met their model's objective (`slo`).

A report has the requests that finished since the gateway's last acknowledged one. The gateway
repeats a report with the same number until the scheduler acknowledges it, and the scheduler counts
each number once.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.contracts.base import Deadline, Frozen, Request

REPORT_INTERVAL_S = 5.0
REPORT_LOST_AFTER_S = 1_800.0
"""A gateway discards a report that was not acknowledged for this long.

The scheduler remembers a gateway's last number for longer, so that no report counts twice.
"""
MAX_MODELS_PER_REPORT = 1_000


class ObjectiveCounts(Frozen):
    """Finished requests of one model.

    Attributes:
        total: Requests with an objective that succeeded, or failed by no fault of the client.
        met: The part of them that met the whole objective.
    """

    model: str
    total: int = Field(ge=0)
    met: int = Field(ge=0)


class ObjectiveStanding(Frozen):
    """A gateway's counts of a model's finished requests, recent ones with more weight.

    It accompanies requests, so that an executor can order the steps of its models.
    """

    gateway: str
    total: int = Field(ge=0)
    met: int = Field(ge=0)


class ReportObjectives(Request):
    """Counts of requests since the gateway's previous report; the reply is `Done`."""

    deadline_ms: Deadline = 3_000
    kind: Literal["report_objectives"] = "report_objectives"
    gateway: str
    number: int = Field(ge=1, description="Consecutive number of the gateway's reports.")
    counts: tuple[ObjectiveCounts, ...] = Field(max_length=MAX_MODELS_PER_REPORT)
