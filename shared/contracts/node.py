"""A node: commands to its nodeagent and the status it broadcasts.

`NodeStatus` is the one source of truth about live instances. It is whole (never a difference), broadcast on every change and every
second, and heard by the scheduler and by every gateway: the route table is a cache of it. `StatusWanted` makes every nodeagent send one now.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter

from shared.contracts.base import ErrorBody, Frozen, Message, Request
from shared.contracts.engine import EngineLoad
from shared.contracts.models import ModelCard
from shared.contracts.phases import Phase, PhaseSpan

STATUS_INTERVAL_S = 1.0
NODE_LOST_AFTER_S = 5.0
"""Without a status for this long a node's instances are taken for gone by the scheduler (gateways learn sooner: no responders)."""


class InstanceState(StrEnum):
    PREPARING = "preparing"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    SUSPENDED = "suspended"
    ASLEEP = "asleep"
    RESUMING = "resuming"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def holds_memory(self) -> bool:
        """Whether the instance's reservation on its device is booked (a failed one until its process is proved gone)."""
        return self not in (InstanceState.STOPPED, InstanceState.SUSPENDED, InstanceState.FAILED)

    @property
    def starting(self) -> bool:
        return self in (InstanceState.PREPARING, InstanceState.LOADING, InstanceState.RESUMING)


class StartInstance(Request):
    """Reserve, start an engine, have it load. Answered at once with `Done` or `Failure`; progress is in `NodeStatus`.
    Repeating it with the same token is harmless."""

    kind: Literal["start"] = "start"
    token: int = Field(description="Fencing token: leader epoch · 2³² + a counter. Older than one seen: refused.")
    plan_id: str
    instance_id: str
    card: ModelCard
    device_ids: tuple[str, ...]
    reserve_bytes: int
    kv_bytes: int
    traceparent: str | None = None
    phases: tuple[PhaseSpan, ...] = Field(default=(), description="What went before (schedule), relative to the sending.")


class StopInstance(Request):
    """Drain, then stop and prove the memory free. `only_if_idle`: fail with `instance_busy` if it is serving.
    `Done` is answered when draining has begun; the end shows in `NodeStatus`. An unknown instance is `Done` too."""

    DEADLINE_MS: ClassVar[int] = 5_000
    kind: Literal["stop"] = "stop"
    token: int
    instance_id: str
    only_if_idle: bool = False
    drain_timeout_ms: int = Field(default=60_000, ge=0, description="After this, running requests are ended with an error.")
    reason: str = ""


NodeCommand = Annotated[StartInstance | StopInstance, Field(discriminator="kind")]
NODE_COMMAND: TypeAdapter[NodeCommand] = TypeAdapter(NodeCommand)


class InstanceMemory(Frozen):
    """Bytes of one instance. `weights` counts shared memory; several instances of one node share it."""

    weights: int = 0
    private: int = 0
    kv: int = 0
    reserved: int = 0


class InstanceStatus(Frozen):
    instance_id: str
    plan_id: str
    token: int
    model: str
    generation: int
    revision: str
    device_ids: tuple[str, ...]
    state: InstanceState
    phase: Phase | None = None
    progress: float = 0.0
    pids: tuple[int, ...] = ()
    memory: InstanceMemory = InstanceMemory()
    freed_bytes: int | None = Field(default=None, description="Proved free after the stop.")
    capacity: int = 1
    load: EngineLoad = EngineLoad()
    phases: tuple[PhaseSpan, ...] = Field(default=(), description="Of the start, relative to this message's sending.")
    traceparent: str | None = None
    error: ErrorBody | None = None


class DeviceStatus(Frozen):
    device_id: str
    kind: Literal["cpu", "cuda"]
    name: str = ""
    budget_bytes: int
    reserved_bytes: int
    used_bytes: int = Field(default=0, description="Measured (NVML; PSS and shared memory on cpu).")


class NodeStatus(Message):
    kind: Literal["node_status"] = "node_status"
    node: str
    boot_id: str = Field(description="New at each start of the nodeagent process.")
    seq: int
    labels: dict[str, str] = Field(default_factory=dict)
    devices: tuple[DeviceStatus, ...]
    instances: tuple[InstanceStatus, ...] = Field(
        default=(), description="Stopped and failed ones stay for a minute, so that a lost message loses nothing."
    )
    stopping: bool = False


class StatusWanted(Message):
    kind: Literal["status_wanted"] = "status_wanted"
