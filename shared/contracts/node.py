"""A node: commands to its nodeagent and the status it broadcasts.

`NodeStatus` is the one source of truth about live instances. It is whole, broadcast every second
and on every change, and received by the scheduler and by every gateway: the route table is a cache
of it. `StatusWanted` makes every nodeagent send one now. Between two statuses, a node with many
instances sends `NodeChanges`, which a receiver may miss: the next status has them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from shared.contracts.base import ErrorBody, Frozen, Message, Request
from shared.contracts.engine import BackgroundWork, EngineLoad
from shared.contracts.models import ModelCard
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.stages import GroupPlace, Stage
from shared.contracts.states import InstanceState as InstanceState

STATUS_INTERVAL_S = 1.0
NODE_LOST_AFTER_S = 5.0
"""Seconds without a status after which the scheduler counts a node's instances as lost. (Gateways
notice sooner: no responders.)
"""


RESERVATION = "reserve_bytes"
"""The `param` of an `insufficient_memory` that says: a reservation waited for bytes in vain.
(Without it the engine or its loader ran out.)
"""


MAX_TOKEN = (1 << 62) - 1
"""A larger fencing token would leave a scheduler no epoch above it that PostgreSQL can store."""
StoredBytes = Annotated[int, Field(ge=0, le=1 << 60)]
"""Bytes of a node that the scheduler stores. A message with others is malformed, so that it does
not fail at the database.
"""


class StartInstance(Request):
    """Reserve, start an engine, have it load.

    Answered at once with `Done` or `Failure`; progress is in `NodeStatus`. Repeating it with the
    same token is harmless.
    """

    kind: Literal["start"] = "start"
    token: int = Field(description="Fencing token: leader epoch · 2³² + a counter. Older than one seen: refused.")
    plan_id: str
    instance_id: str
    card: ModelCard
    device_ids: tuple[str, ...]
    reserve_bytes: int
    kv_bytes: int
    grant: tuple[str, ...] = Field(
        default=(),
        description="Late binding: other devices of the node that it may run on instead of `device_ids`. The nodeagent chooses when it starts "
        "it, has the loader load its weights, and reports the device in `InstanceStatus`. A start that waits for bytes may be granted "
        "its own device: the nodeagent then has its weights loaded. Empty: it runs on `device_ids`.",
    )
    executor_bytes: int = Field(
        default=0, description="Of the executor that it is attached to: reserved beside `reserve_bytes`, once on each device."
    )
    traceparent: str | None = None
    phases: tuple[PhaseSpan, ...] = Field(default=(), description="What went before (schedule), relative to the sending.")
    priority: int = Field(default=0, description="Of its reservation, where several wait for bytes.")
    wait_ms: int = Field(
        default=0,
        ge=0,
        description="How long its reservation may wait for bytes; 0: refused if there is no room now. One that waited in vain shows as failed with "
        "`insufficient_memory` of `RESERVATION`; a resumption as suspended, with that error and this command's token.",
    )
    park: bool = Field(default=False, description="Suspend it as soon as it is ready.")
    template: str | None = Field(
        default=None,
        description="A suspended instance of the node, of the same template key, that ends: its engine changes its model and becomes this one. "
        "If it is gone, this one starts cold.",
    )
    stage: Stage | None = Field(
        default=None,
        description="It is this stage of a group on several nodes, on one device: `reserve_bytes` and `kv_bytes` are the stage's own. "
        "None: it is an instance by itself, or the stages of the model are all on `device_ids`.",
    )


class StopInstance(Request):
    """Drain, then stop and prove the memory free.

    `only_if_idle`: fail with `instance_busy` if it is serving. `Done` is answered when draining has
    begun; the end shows in `NodeStatus`. An unknown instance is `Done` too.
    """

    kind: Literal["stop"] = "stop"
    token: int
    instance_id: str
    only_if_idle: bool = False
    drain_timeout_ms: int = Field(default=60_000, ge=0, description="After this, running requests are ended with an error.")
    reason: str = ""


class SuspendInstance(Request):
    """Drain an instance, then suspend it and give its device memory back.

    The process stays; its device memory is given back once that is proved. The reply `Done` follows
    when draining has begun; `NodeStatus` shows the end as suspended or asleep. With `only_if_idle`
    the request fails with `instance_busy` if the instance is serving.

    An instance that cannot be suspended (`InstanceStatus.can_suspend`), or whose suspension fails,
    is stopped instead. For a suspended or unknown instance the reply is `Done`.
    """

    kind: Literal["suspend"] = "suspend"
    token: int
    instance_id: str
    only_if_idle: bool = False
    drain_timeout_ms: int = Field(
        default=60_000, ge=0, description="With requests left after this it is stopped, and they end with an error."
    )
    reason: str = ""


class ResumeInstance(Request):
    """Reserve what the instance needs and bring it back.

    Answered at once with `Done` or `Failure` (`insufficient_memory`, `not_found`); progress is in
    `NodeStatus`: resuming, then ready. One that is ready or resuming is `Done`; one that is being
    suspended resumes as soon as it can. A restore that fails is followed by one cold start under
    the same instance id.
    """

    kind: Literal["resume"] = "resume"
    token: int
    plan_id: str
    instance_id: str
    traceparent: str | None = None
    phases: tuple[PhaseSpan, ...] = Field(default=(), description="What went before (schedule), relative to the sending.")
    priority: int = 0
    wait_ms: int = Field(default=0, ge=0, description="As of `StartInstance`.")
    device_ids: tuple[str, ...] = Field(
        default=(),
        description="Restore it onto these devices of the node (`Suspension.moves_to`); none: onto those that it had. A move that the node "
        "refuses is answered with `restore_failed`, and the instance stays suspended.",
    )


NodeCommand = Annotated[StartInstance | StopInstance | SuspendInstance | ResumeInstance, Field(discriminator="kind")]
NODE_COMMAND: TypeAdapter[NodeCommand] = TypeAdapter(NodeCommand)


class InstanceMemory(Frozen):
    """Bytes of one instance.

    `weights` counts shared memory, or on a GPU what the loader has there; several instances of one
    node share it.
    """

    weights: int = 0
    private: int = 0
    kv: int = 0
    reserved: StoredBytes = 0


SuspendWay = Literal["cpu", "cuda", "sleep", "sleep_cuda"]
"""cpu: frozen, its pages written to swap. cuda: checkpointed by the driver into host memory, then
frozen. sleep: by the engine's own means.
"""


class Timing(Frozen):
    """One start, suspension or resumption.

    `at`: Unix seconds when it was over, for people.
    """

    at: float
    took_ms: float


class Suspension(Frozen):
    """The way to suspend an instance, and its measurements."""

    possible: bool = False
    assessed: bool = Field(
        default=True,
        description="False: its node has not looked at it yet. Asked to suspend it, it looks first, and stops it if need be.",
    )
    reason: str = Field(default="", description="Why it is not possible.")
    way: SuspendWay | None = Field(default=None, description="By which it was suspended last, or would be.")
    freed_bytes: int = Field(default=0, description="Of device memory by the last one, read back.")
    left_bytes: int = Field(
        default=0, description="Of device memory that one leaves in use: as measured, before the first as expected."
    )
    snapshot_bytes: int = Field(default=0, description="Charged to the node's snapshot budget now.")
    swap_bytes: int = Field(
        default=0,
        description="Of the snapshot, in swap: all of `snapshot_bytes` if the way is cpu, else what was written there from host "
        "memory, which `snapshot_bytes` does not count.",
    )
    need_bytes: StoredBytes = Field(default=0, description="To be reserved for a resumption, what is left included.")
    resume_ms: float | None = Field(default=None, description="Expected: as measured, before the first from its bytes.")
    resumes: int = 0
    fell_back: ErrorBody | None = Field(
        default=None, description="Why the last restore, or the change of a template's model, failed; it was started cold then."
    )
    moves_to: tuple[str, ...] = Field(
        default=(), description="Other devices of the node, of the same kind, that its snapshot could be restored onto."
    )


class InstanceStatus(Frozen):
    instance_id: str
    plan_id: str
    token: int = Field(ge=0, le=MAX_TOKEN)
    model: str
    generation: int
    revision: str
    device_ids: tuple[str, ...]
    state: InstanceState
    phase: Phase | None = None
    progress: float = 0.0
    pids: tuple[int, ...] = ()
    ended_pid: int = Field(default=0, description="Its process that has ended, to which `load` belongs; 0: it has none.")
    memory: InstanceMemory = InstanceMemory()
    freed_bytes: int | None = Field(default=None, description="Proved free after the stop.")
    capacity: int = 1
    load: EngineLoad = EngineLoad()
    phases: tuple[PhaseSpan, ...] = Field(default=(), description="Of the start, relative to this message's sending.")
    traceparent: str | None = None
    error: ErrorBody | None = None
    engine: str = "builtin"
    accepts_requests: bool = Field(
        default=False, description="While loading: it takes requests, and computes them as its weights arrive."
    )
    suspension: Suspension = Suspension()
    started: Timing | None = None
    suspended: Timing | None = None
    resumed: Timing | None = None
    template_key: str = Field(
        default="", description="While it is suspended: a model of this template key may take its engine. Empty: none may."
    )
    template: str | None = Field(default=None, description="The instance whose engine it took.")
    bound_by: str = Field(
        default="",
        description="The rule by which its node chose the device among the granted ones (Torpor, Algorithm 1): resident, peer, quiet, light, "
        "host, or busy. Empty: the scheduler chose.",
    )
    group: GroupPlace | None = Field(
        default=None,
        description="It is a stage of a group on several nodes. Later stages answer no requests: gateways do not use them.",
    )

    @property
    def is_later_stage(self) -> bool:
        """True for a stage behind the first one: it belongs to the first stage's instance."""
        return self.group is not None and self.group.index > 0

    @property
    def device_count(self) -> int:
        """Devices that serve with it: of a group on several nodes those of all stages."""
        return self.group.count if self.group is not None else max(1, len(self.device_ids))


WEIGHTS_ON_GPU = "weights:cuda"
"""The capability of having weights in GPU memory of the loader's, which engines map."""


class Capability(Frozen):
    """Something that this node can do, or why it cannot."""

    name: str = Field(description="As suspend:cpu, suspend:cuda, suspend:sleep, weights:cuda.")
    available: bool
    reason: str = ""


class DeviceStatus(Frozen):
    device_id: str
    kind: Literal["cpu", "cuda"]
    name: str = ""
    budget_bytes: StoredBytes
    reserved_bytes: int
    executor_bytes: int = Field(default=0, description="The part of `reserved_bytes` for its executor.")
    used_bytes: int = Field(default=0, description="Measured (NVML; PSS and shared memory on cpu).")
    memory: Literal["unified", "separate"] = Field(
        default="unified",
        description="separate: a cpu device whose memory is pages that weights are copied into, and stay in for reuse.",
    )


class SwapSpace(Frozen):
    """The swap space of a node's host."""

    total_bytes: int
    free_bytes: int


class EndedEngine(Frozen):
    """The last meters of an engine that has ended."""

    instance_id: str
    pid: int
    model: str
    device_kind: str
    device_count: int
    charged_s: float | None = Field(default=None, description="`EngineLoad.charged_s`.")
    background: tuple[BackgroundWork, ...] = Field(default=(), description="`EngineLoad.background`.")


class NodeStatus(Message):
    kind: Literal["node_status"] = "node_status"
    node: str
    boot_id: str = Field(description="New at each start of the nodeagent process.")
    seq: int
    labels: dict[str, str] = Field(default_factory=dict)
    devices: tuple[DeviceStatus, ...]
    instances: tuple[InstanceStatus, ...] = Field(
        default=(),
        description="Failed ones stay for a minute and stopped ones for some seconds, so that a lost message loses nothing.",
    )
    stopping: bool = False
    snapshot_bytes: int = Field(default=0, description="Of suspended instances: host memory and swap.")
    snapshot_budget_bytes: int = 0
    swap: SwapSpace | None = Field(default=None, description="Read every ten seconds; None: an earlier version.")
    capabilities: tuple[Capability, ...] = ()
    ended_engines: tuple[EndedEngine, ...] = Field(
        default=(),
        description="Engines that ended in the last ten minutes, in the status after `StatusWanted` or a reconnection: a receiver that was "
        "not there reads their meters.",
    )


class InstanceOutline(Frozen):
    """The part of an `InstanceStatus` that loaders use."""

    instance_id: str
    state: InstanceState


class NodeOutline(Message):
    """The part of a `NodeStatus` that loaders use.

    A receiver reads a status as this, so that it does not pay for phases and measurements.
    """

    node: str
    instances: tuple[InstanceOutline, ...] = ()
    capabilities: tuple[Capability, ...] = ()


class NodeChanges(Message):
    """The instances of a node that have changed since its last message.

    Sent instead of a `NodeStatus` by a node with many instances.
    """

    kind: Literal["node_changes"] = "node_changes"
    node: str
    boot_id: str
    seq: int = Field(description="Of the same count as `NodeStatus.seq`.")
    devices: tuple[DeviceStatus, ...]
    instances: tuple[InstanceStatus, ...]


class StatusWanted(Message):
    kind: Literal["status_wanted"] = "status_wanted"
