"""What the scheduler decided and why: shown by `thaw explain`, kept in Postgres, bounded by age and count."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.contracts.base import ErrorBody, Frozen
from shared.contracts.phases import PhaseSpan

Way = Literal["warm", "load", "evict_then_load", "restore", "evict_then_restore", "wait", "impossible"]
RESTORES = ("restore", "evict_then_restore")
"""Ways that bring a suspended instance back: what they measure says nothing of a start."""


class Candidate(Frozen):
    """One device that was considered. `excluded` says why it could not be taken; None: it could."""

    node: str
    device_ids: tuple[str, ...]
    way: Way
    predicted_ms: float | None = None
    predicted: dict[str, float] = Field(default_factory=dict, description="Milliseconds by phase.")
    needed_bytes: int = 0
    free_bytes: int = 0
    victims: tuple[str, ...] = Field(default=(), description="Instances that would leave, as model (instance).")
    excluded: str | None = None


class PlanRecord(Frozen):
    plan_id: str
    model: str
    created: float = Field(description="Unix seconds, for people.")
    trigger: str = Field(description="What asked: demand, wake, min_replicas, replicas, retry, park.")
    way: Way
    chosen: Candidate | None = None
    candidates: tuple[Candidate, ...] = ()
    reason: str = ""
    instance_id: str | None = None
    outcome: Literal["pending", "ready", "failed", "cancelled"] = "pending"
    measured: tuple[PhaseSpan, ...] = ()
    measured_ms: float | None = None
    error: ErrorBody | None = None
    traceparent: str | None = None
