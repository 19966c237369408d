"""Entities that are lost with the leader. The next one rebuilds them from reports within seconds.

Its failure counts, cooldowns and shares of keys start from zero. Of a `LoaderPresence` Postgres has
the cached weights and the links (`adapters/statistics.py`), until the loader's first message.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal
from zlib import crc32

from services.scheduler.domain.values import value
from shared.contracts.base import ErrorBody
from shared.contracts.demand import KeyDemand
from shared.contracts.loader import LoaderStatus
from shared.contracts.node import InstanceStatus, NodeStatus


@value(frozen=True, slots=True)
class Presence:
    """The last message of a nodeagent.

    Attributes:
        status: None: the database has the node, which has sent no message yet.
        ending_since: By instance that failed: the time of the first report of that.
        stuck: Those of them whose memory nothing waits for any more.
    """

    node: str
    last_message_at: float
    alive: bool = True
    status: NodeStatus | None = None
    ending_since: dict[str, float] = field(default_factory=dict)
    stuck: frozenset[str] = frozenset()

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

    Attributes:
        idle_since: None while it serves.
        progressed_at: Time at which its start last made progress.
        completed_before: Requests that it had completed when it last became ready, or at
            `counted_since`.
        counted_since: Time of the first report that this leader got of an instance that had served;
            None: it had not.
        load_changed_at: Time at which its load last changed.
        leaving_since: Time of the first report since it was asked to leave; None: it was not.
        is_stuck: True if it should have left long ago: nothing waits for its memory any more.
    """

    instance_id: str
    status: InstanceStatus
    idle_since: float | None
    progressed_at: float = 0.0
    completed_before: int = 0
    counted_since: float | None = None
    load_changed_at: float = 0.0
    leaving_since: float | None = None
    is_stuck: bool = False

    @property
    def key(self) -> str:
        return self.instance_id


@value(frozen=True, slots=True)
class GatewayDemand:
    """The demand of one gateway for one model.

    Attributes:
        waiting: Requests without an instance.
        in_flight: Requests that an instance has.
        since: Time since which requests wait.
        traceparents: Of waiting requests.
        window: Requests that arrived in the last sliding window.
        peak: Requests that arrived in the fullest recent window.
        keys: Requests by key and priority, those in flight included.
    """

    gateway: str
    waiting: int
    in_flight: int
    since: float
    last_message_at: float
    traceparents: tuple[str, ...] = ()
    window: int = 0
    peak: int = 0
    keys: tuple[KeyDemand, ...] = ()


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

    Attributes:
        first: The `Instance` of the group, which is its first stage.
        sent_at: None while its start is not sent, and its memory is promised.
        stop_at: Time of its last stop command.
        reported: Its node has reported it.
        is_ready: Its node has reported it as loaded.
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
    """The last start or resume command that this leader sent for an instance or stage.

    Attributes:
        answered_at: Time of its acceptance or refusal; None: it waits behind other commands for the
            node, or its node has not answered.
    """

    instance_id: str
    answered_at: float | None = None

    @property
    def key(self) -> str:
        return self.instance_id


@value(frozen=True, slots=True)
class Fetch:
    """Weights that a node fetches from a remote source for a start (HydraServe §4.2).

    Attributes:
        holder: The instance or stage.
        pending_bytes: S_i at the time `at`.
        deadline: D_i, at which all bytes must have arrived; None: the model has no objective for
            the first token.
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

    Attributes:
        instances: Those that a sleep waits for.
        stopped: Those of them that have stopped so far.
        freed_bytes: Bytes that these have freed.
        pull: The key of the pull.
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
    """A model whose demand exceeds, since then, what its instances can run at once."""

    model: str
    since: float

    @property
    def key(self) -> str:
        return self.model


@value(frozen=True, slots=True)
class KeyShare:
    """The share of a key in the devices, for requests of one priority (`demand.key_shares`).

    Attributes:
        flow: Opaque id of the key.
        tag_s: Device-seconds that it was charged, divided by its weight.
        start_s: The larger of its tag before its last start, and `tag_s` less `TURN_S`. A key that
            begins to wait starts at the smallest `start_s` of the keys that wait.
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

    Attributes:
        attempts: Failures in a row.
        final: The model is not parked before it changes, or another scheduler leads.
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

    Attributes:
        failed_devices: The devices of those starts, as node/device.
    """

    model: str
    attempts: int = 0
    not_before: float = 0.0
    failed_devices: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.model


@value(frozen=True, slots=True)
class Cooldown:
    """A subject that is not tried again before `until`, as an instance or device (node/device)."""

    subject: str
    until: float

    @property
    def key(self) -> str:
        return self.subject


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
