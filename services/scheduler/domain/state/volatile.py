"""Entities that come from reports only: lost with the leader, and rebuilt within seconds."""

from __future__ import annotations

from dataclasses import field
from typing import Literal
from zlib import crc32

from services.scheduler.domain.cost.learned import Parameter
from services.scheduler.domain.values import value
from shared.contracts.base import ErrorBody, Frozen
from shared.contracts.demand import KeyDemand
from shared.contracts.loader import LoaderStatus
from shared.contracts.node import InstanceStatus, NodeStatus


@value(frozen=True, slots=True)
class Presence:
    """The last message of a nodeagent. `status` None: known from the database, no message yet."""

    node: str
    last_message_at: float
    alive: bool = True
    status: NodeStatus | None = None

    @property
    def key(self) -> str:
        return self.node


@value(frozen=True, slots=True)
class LoaderPresence:
    """The last message of a loader."""

    node: str
    last_message_at: float
    status: LoaderStatus

    @property
    def in_memory(self) -> tuple[str, ...]:
        """Return the revisions whose weights are complete in the node's memory."""
        whole = (s for s in self.status.segments if s.error is None and not s.is_partial)
        held = (s.weights_id for s in whole if s.loaded_bytes >= s.total_bytes > 0)
        return (*held, *(c.weights_id for c in self.status.cached if c.tier == "dram"))

    @property
    def on_disk(self) -> tuple[str, ...]:
        """Return the revisions whose files the loader has on the node's disk."""
        return tuple([c.weights_id for c in self.status.cached if c.tier == "ssd"])

    @property
    def on_devices(self) -> tuple[str, ...]:
        """Return the revisions of which a separate device of the node has units."""
        return tuple([w.weights_id for memory in self.status.memory for w in memory.weights])

    @property
    def key(self) -> str:
        return self.node


EXPECTATION_GROUPS = 32


def expectation_group(node: str) -> str:
    """Return the group of loaders that are sent expectations at the same time."""
    return str(crc32(node.encode()) % EXPECTATION_GROUPS)


@value(frozen=True, slots=True)
class ExpectationSent:
    """Time at which the loaders of a group were last sent the expected models."""

    group: str
    sent_at: float

    @property
    def key(self) -> str:
        return self.group


@value(frozen=True, slots=True)
class InstanceReport:
    """An instance as its nodeagent last reported it.

    `idle_since` None: it serves. `progressed_at`: when its start last made progress.
    """

    instance_id: str
    status: InstanceStatus
    idle_since: float | None
    progressed_at: float = 0.0

    @property
    def key(self) -> str:
        return self.instance_id


@value(frozen=True, slots=True)
class GatewayDemand:
    gateway: str
    waiting: int
    in_flight: int
    since: float
    last_message_at: float
    traceparents: tuple[str, ...] = ()
    window: int = 0
    """Requests that arrived in the last sliding window."""
    peak: int = 0
    """Requests that arrived in the fullest recent window."""
    keys: tuple[KeyDemand, ...] = ()
    """Requests by key and priority, those in flight included."""


@value(frozen=True, slots=True)
class ModelDemand:
    """The demand for one model, by gateway."""

    model: str
    gateways: tuple[GatewayDemand, ...] = ()

    @property
    def key(self) -> str:
        return self.model

    @property
    def waiting(self) -> int:
        return sum([g.waiting for g in self.gateways])

    @property
    def in_flight(self) -> int:
        return sum([g.in_flight for g in self.gateways])

    @property
    def window(self) -> int:
        return sum([g.window for g in self.gateways])

    @property
    def peak(self) -> int:
        return sum([g.peak for g in self.gateways])

    @property
    def since(self) -> float | None:
        return min([g.since for g in self.gateways if g.waiting], default=None)

    @property
    def keys(self) -> tuple[KeyDemand, ...]:
        """Return the requests by key and priority, of gateways where some wait.

        A key may occur once for each gateway.
        """
        return tuple([k for g in self.gateways if g.waiting for k in g.keys])

    @property
    def traceparents(self) -> tuple[str, ...]:
        return tuple(t for g in self.gateways if g.waiting for t in g.traceparents)[:32]


@value(frozen=True, slots=True)
class LaterStage:
    """A stage behind the first one of a group on several nodes: a process that holds memory.

    The `Instance` of the group is the first stage, `first`. `sent_at` None: its start is not sent
    yet, and its memory is promised. `reported`: its node has reported it. `is_ready`: as loaded.
    """

    stage_id: str
    first: str
    model: str
    node: str
    device_id: str
    index: int
    count: int
    reserve_bytes: int
    kv_bytes: int
    sent_at: float | None = None
    stop_at: float | None = None
    reported: bool = False
    is_ready: bool = False

    @property
    def key(self) -> str:
        return self.stage_id


@value(frozen=True, slots=True)
class Delivery:
    """The start or resumption command that this leader has sent last for an instance or stage.

    `answered_at` None: it waits behind other commands for the node, or its node has not answered.
    """

    instance_id: str
    answered_at: float | None = None

    @property
    def key(self) -> str:
        return self.instance_id


@value(frozen=True, slots=True)
class Fetch:
    """Weights that a node fetches from a remote source for a start (HydraServe §4.2).

    `holder`: the instance or stage. `pending_bytes`: S_i at the time `at`. `deadline`: D_i, when
    they must be there; None: the model has no objective for the first token.
    """

    holder: str
    node: str
    model: str
    weights_id: str
    pending_bytes: float
    deadline: float | None
    at: float

    @property
    def key(self) -> str:
        return self.holder


@value(frozen=True, slots=True)
class Waiter:
    """An operator's request that is answered later.

    For a sleep: the `instances` it waits for, those `stopped` so far, and the bytes they freed. For
    a pull: its key.
    """

    waiter: str
    kind: Literal["wake", "sleep", "pull"]
    model: str
    since: float
    instances: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()
    freed_bytes: int = 0
    pull: str = ""

    @property
    def key(self) -> str:
        return self.waiter


@value(frozen=True, slots=True)
class Unschedulable:
    """A model that needs more instances than it has, and why none can be placed."""

    model: str
    since: float
    reason: str = ""

    @property
    def key(self) -> str:
        return self.model


@value(frozen=True, slots=True)
class Overload:
    """Demand exceeds what the model's instances can run at once, since then."""

    model: str
    since: float

    @property
    def key(self) -> str:
        return self.model


@value(frozen=True, slots=True)
class KeyShare:
    """Device-seconds that a key has received for requests of one priority, divided by its weight.

    `flow`: opaque id of the key. `start_s`: where a key begins that has waited for nothing lately.
    See `demand.key_shares`.
    """

    flow: str
    priority: int
    tag_s: float
    start_s: float = 0.0

    @property
    def key(self) -> str:
        return share_key(self.flow, self.priority)


@value(frozen=True, slots=True)
class ModelUsers:
    """The keys whose requests used a model when some waited for it last."""

    model: str
    keys: tuple[KeyDemand, ...]

    @property
    def key(self) -> str:
        return self.model


@value(frozen=True, slots=True)
class ShareClock:
    """The time until which instances in use were charged to keys; it `runs` while a model waits."""

    at: float
    runs: bool = True

    @property
    def key(self) -> str:
        return ""


def share_key(flow: str, priority: int) -> str:
    """Return the key of the `KeyShare` of a flow and a priority."""
    return f"{priority}/{flow}"


@value(frozen=True, slots=True)
class FailureHistory:
    """Failures of a model in a row.

    Attributes:
        attempts: Failed starts of the present try.
        failed_devices: The devices of those starts, as node/device.
        failures: Failed tries in a row.
        kills: Starts of the present try whose engine was killed.
    """

    model: str
    attempts: int = 0
    failed_devices: tuple[str, ...] = ()
    failures: int = 0
    kills: int = 0
    failed_at: float | None = None
    not_before: float = 0.0
    error: ErrorBody | None = None

    @property
    def key(self) -> str:
        return self.model


@value(frozen=True, slots=True)
class ParkFailures:
    """The reason why a model could not be parked.

    `attempts`: failures in a row. `final`: not tried again before the model changes, or the leader.
    """

    model: str
    attempts: int = 0
    failed_at: float = 0.0
    not_before: float = 0.0
    reason: str = ""
    final: Literal["", "failed", "impossible"] = ""

    @property
    def key(self) -> str:
        return self.model


@value(frozen=True, slots=True)
class ConsolidationFailures:
    """Failed attempts in a row to make a pipeline group of a model one instance (ADR 0062).

    `failed_devices`: the devices of those starts, as node/device.
    """

    model: str
    attempts: int = 0
    not_before: float = 0.0
    failed_devices: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.model


class MemoryProfile(Frozen):
    """Measured bytes: in all, of weights, per token of KV cache, and of the engine's runtime."""

    need_bytes: int
    load_bytes: int = 0
    kv_bytes_per_token: int = 0
    runtime_bytes: int = 0


@value(frozen=True, slots=True)
class MeasuredMemory:
    """The measured memory of a model's engine on all its devices together, by kind of device."""

    model: str
    generation: int
    engine: str
    by_kind: dict[str, MemoryProfile]

    @property
    def key(self) -> str:
        return self.model


@value(frozen=True, slots=True)
class Cooldown:
    """A busy instance, or a device (node/device) that refused: not asked before `until`."""

    subject: str
    until: float

    @property
    def key(self) -> str:
        return self.subject


ANYWHERE = ""
"""In place of a node: measured on all nodes."""


@value(frozen=True, slots=True)
class Estimate:
    """Learned quantities of starting a model on a node.

    By quantity: milliseconds of a phase, or bytes per second ("bandwidth:ssd"). An empty model: of
    the node, whatever the model.
    """

    model: str
    node: str
    parameters: dict[str, Parameter] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return estimate_key(self.model, self.node)


def estimate_key(model: str, node: str) -> str:
    return f"{model}\0{node}"


@value(frozen=True, slots=True)
class HourCounts:
    """Requests that gateways reported within one hour (Unix time / 3600), and those that met the
    objective.
    """

    hour: int
    total: int
    met: int


@value(frozen=True, slots=True)
class AppliedReport:
    """The last report of a gateway that was counted."""

    gateway: str
    number: int
    at: float


@value(frozen=True, slots=True)
class SloCounts:
    """Requests of a model with an objective, by hour, oldest first.

    Durable: a new leader continues from the counts of the last one.
    """

    model: str
    hours: tuple[HourCounts, ...] = ()
    applied: tuple[AppliedReport, ...] = ()

    @property
    def key(self) -> str:
        return self.model


@value(frozen=True, slots=True)
class SloQueue:
    """Alpha of the SLO queue (Torpor, Appendix A.3), and the compliant ratio when it was set."""

    alpha: float
    ratio: float
    since: float

    @property
    def key(self) -> str:
        return ""


@value(frozen=True, slots=True)
class Counter:
    """Commands numbered so far in this epoch."""

    value: int

    @property
    def key(self) -> str:
        return "counter"
