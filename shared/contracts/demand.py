"""Gateways report waiting requests to the scheduler, and receive its failures.

Demand is a level, not an edge: a gateway repeats it every second while anything waits, and once
with `waiting=0` when nothing does any more. A new leader therefore knows all demand within a
second.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.contracts.base import Deadline, ErrorBody, Frozen, Message, Request

DEMAND_INTERVAL_S = 1.0
DEMAND_LOST_AFTER_S = 5.0
ARRIVALS_WINDOW_S = 1.0
"""Length of the sliding window that counts arrivals, from HydraServe's published code; the paper
states none.
"""

OVERCOMMIT = 2
"""Requests that gateways send to an instance at once, as a multiple of its capacity.

The requests of all gateways count. The instance's own queue then never runs dry before the gateways
learn of a finished request. Further requests wait in gateways, where they can still go to another
replica.
"""

MAX_KEYS = 32


class KeyDemand(Frozen):
    """The requests of one API key and one priority."""

    flow: str = Field(default="", max_length=64, description="Opaque id of the API key; empty: no key. The same in all gateways.")
    weight: float = Field(default=1.0, gt=0, description="Share relative to other keys.")
    priority: int = Field(default=0, description="Higher ones go first.")
    waiting: int = Field(default=0, ge=0)
    in_flight: int = Field(default=0, ge=0)


class Demand(Request):
    deadline_ms: Deadline = 3_000
    kind: Literal["demand"] = "demand"
    gateway: str
    model: str
    waiting: int = Field(ge=0)
    in_flight: int = Field(default=0, ge=0)
    oldest_wait_ms: int = Field(default=0, ge=0)
    window: int = Field(default=0, ge=0, description="Requests that arrived in the last ARRIVALS_WINDOW_S.")
    peak: int = Field(default=0, ge=0, description="… and in the fullest of such windows lately.")
    traceparents: tuple[str, ...] = Field(default=(), max_length=32)
    keys: tuple[KeyDemand, ...] = Field(default=(), max_length=MAX_KEYS, description="Those with the most waiting requests first.")


class DemandNoted(Message):
    """Acknowledgement of a model's demand.

    Attributes:
        eta_ms: Predicted time until an instance is ready; None if unknown, for lack of memory.
    """

    kind: Literal["demand_noted"] = "demand_noted"
    outlook: Literal["ready", "starting", "waiting"]
    plan_id: str | None = None
    eta_ms: int | None = None
    reason: str = ""


class LoadFailed(Message):
    """Report that an attempt to make `model` ready failed for good.

    The scheduler's own retries have failed too: fail the requests that wait for the model. The next
    request may try again.
    """

    kind: Literal["load_failed"] = "load_failed"
    model: str
    plan_id: str | None = None
    error: ErrorBody
