"""Define the scheduler's recorded decisions and their reasons.

`thaw explain` shows them. Postgres stores them, bounded by age and count.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.contracts.base import ErrorBody, Frozen
from shared.contracts.phases import PhaseSpan, measure_covered

Way = Literal["warm", "load", "evict_then_load", "restore", "evict_then_restore", "template", "wait", "impossible"]
ReadyBy = Literal["ready", "wake", "restore", "template", "reuse", "load", "peer_copy", "pipeline"]
"""Ways to make a model ready on a device set, in this order: it is ready already; wake it from its
engine's sleep; restore a snapshot; take the suspended engine of another model of its template key;
load the missing units; load all of it (from DRAM, SSD or remote); copy from another device; divide
its layers among several devices.
"""
Clearing = Literal["none", "leaving", "evict", "suspend", "preempt", "migrate"]
"""Ways to clear a device set first, in this order: there is room; wait for leaving instances; stop
idle instances; suspend idle instances; drain serving instances; migrate the requests of serving
instances.
"""
RESTORES = ("restore", "evict_then_restore")
"""Ways that resume a suspended instance. Their measurements do not count for starts."""


class Candidate(Frozen):
    """One device that was considered.

    `excluded` says why it could not be taken; None: it could.
    """

    node: str
    device_ids: tuple[str, ...]
    way: Way
    predicted_ms: float | None = None
    predicted: dict[str, float] = Field(default_factory=dict, description="Milliseconds by phase.")
    needed_bytes: int = 0
    free_bytes: int = 0
    victims: tuple[str, ...] = Field(default=(), description="Instances that would leave, as model (instance).")
    excluded: str | None = None
    ready_by: ReadyBy = "load"
    clearing: Clearing = "none"
    source: str = Field(default="", description="Source of its bytes: dram, ssd, remote, or a device; empty: nowhere, or unknown.")
    resident_bytes: int = Field(default=0, description="Bytes of its weights that are on the device.")
    read_bytes: int | None = Field(
        default=None, description="Bytes to read from the source, for a separate device; null: all that are not resident."
    )
    weights_bytes: int = Field(default=0, description="Of all its weights; 0: unknown.")
    peers: tuple[str, ...] = Field(default=(), description="Other devices of the node that bytes are copied from.")
    peer_bytes: int = Field(default=0, description="Bytes that are copied from them.")
    stages: int = Field(default=1, description="Of a pipeline: `device_ids` has its first stage.")
    full_workers: int = 1
    later_devices: tuple[str, ...] = Field(default=(), description="Of a pipeline: the device of each later stage, as node/device.")
    stage_sources: tuple[str, ...] = Field(default=(), description="Of a pipeline: the source of each stage's bytes, as `source`.")
    spread_ms: float | None = Field(
        default=None, description="Mean absolute error of the parameters that `predicted_ms` is made of."
    )
    queued_ms: float = Field(default=0.0, description="Of its load: waiting for loads before it on the same links.")
    others_ms: float = Field(
        default=0.0, description="What it is expected to cost those that leave, weighted by how likely they are wanted."
    )
    template: str | None = Field(default=None, description="With `template`: the suspended instance whose engine it takes.")
    took_ms: float | None = Field(default=None, description="Of the chosen one that became ready: from the decision until then.")
    cleared_ms: float | None = Field(
        default=None, description="Of the chosen one with victims: from the decision until their memory was free."
    )

    @property
    def already_there(self) -> str:
        """Text as "7.1 of 8.0 GiB already on cpu:1"; empty: nothing is there, or it is unknown."""
        return self._part(self.resident_bytes, f"already on {', '.join(self.device_ids)}")

    @property
    def from_peers(self) -> str:
        """Text as "2.1 of 8.0 GiB from cpu:1"; empty: nothing is copied from another device."""
        return self._part(self.peer_bytes, f"from {', '.join(self.peers)}")

    def _part(self, nbytes: int, where: str) -> str:
        if not nbytes or not self.weights_bytes:
            return ""
        unit, name = (2**30, "GiB") if self.weights_bytes >= 2**30 else (2**20, "MiB")
        return f"{nbytes / unit:.1f} of {self.weights_bytes / unit:.1f} {name} {where}"

    @property
    def error_ms(self) -> float | None:
        """The measured minus the predicted seconds."""
        return None if self.took_ms is None or self.predicted_ms is None else self.took_ms - self.predicted_ms


class Preemption(Frozen):
    """The preemption of an instance that served.

    Attributes:
        plan_id: The plan of the start that needed its memory.
        at: Unix seconds of the decision.
    """

    plan_id: str
    at: float


class PlanRecord(Frozen):
    plan_id: str
    model: str
    created: float = Field(description="Unix seconds, for people.")
    trigger: str = Field(description="What asked: demand, wake, min_replicas, replicas, retry, park, migrate, consolidation.")
    way: Way
    chosen: Candidate | None = None
    candidates: tuple[Candidate, ...] = ()
    reason: str = ""
    instance_id: str | None = None
    outcome: Literal["pending", "ready", "failed", "cancelled"] = "pending"
    measured: tuple[PhaseSpan, ...] = ()
    measured_ms: float | None = Field(default=None, description="From the demand until ready.")
    error: ErrorBody | None = None
    traceparent: str | None = None
    preempted: Preemption | None = Field(default=None, description="Of the started instance, if that may cause a restart.")
    caused_by: str | None = Field(
        default=None, description="The plan whose preemption or migration made this start necessary, and whose requests pay for it."
    )

    @property
    def measured_phases(self) -> dict[str, float]:
        """Milliseconds by phase; spans of one phase that overlap count once."""
        spans: dict[str, list[tuple[float, float]]] = {}
        for s in self.measured:
            spans.setdefault(s.phase.value, []).append((s.start_ms, s.end_ms))
        return {phase: measure_covered(found) for phase, found in spans.items()}
