"""What the cluster's state is made of. All frozen: a change replaces a whole entity.

`Model`, `Node`, `Instance` and `PlanRecord` survive in Postgres; everything else is heard again within a second or two of a new leader's
start. Times are seconds on the loop's clock (Unix time at the process's start plus monotonic time since), bytes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shared.contracts.base import ErrorBody
from shared.contracts.loader import LoaderStatus
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, InstanceStatus, NodeStatus
from shared.contracts.plans import PlanRecord

Leaving = Literal["no", "if_idle", "drain"]


@dataclass(frozen=True, slots=True)
class Model:
    """`resting`: told to sleep; `replicas.min` holds again from the next demand, wake or change of the model."""

    card: ModelCard
    error: str | None = None
    resting: bool = False

    @property
    def key(self) -> str:
        return self.card.name

    @property
    def floor(self) -> int:
        """How many instances are kept up without demand."""
        return 0 if self.resting else self.card.spec.replicas.min


@dataclass(frozen=True, slots=True)
class Device:
    device_id: str
    kind: Literal["cpu", "cuda"]
    name: str
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """`drain_since`: being drained since then (a drained node is cordoned too)."""

    name: str
    boot_id: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    cordoned: bool = False
    drain_since: float | None = None

    @property
    def key(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Instance:
    """What the scheduler believes and wants of one instance.

    `sent_at` None: a claim. Its bytes are promised to it, and its start is sent once the nodeagent has reported them free.
    """

    instance_id: str
    plan_id: str
    model: str
    generation: int
    revision: str
    node: str
    device_ids: tuple[str, ...]
    token: int
    reserve_bytes: int
    kv_bytes: int
    requested_at: float
    planned_at: float
    state: InstanceState = InstanceState.PREPARING
    leaving: Leaving = "no"
    leave_reason: str = ""
    stop_at: float | None = None
    sent_at: float | None = None
    ready_at: float | None = None
    trigger: str = "demand"
    traceparent: str | None = None

    @property
    def key(self) -> str:
        return self.instance_id

    @property
    def claim(self) -> bool:
        return self.sent_at is None

    @property
    def label(self) -> str:
        return f"{self.model} ({self.instance_id})"


@dataclass(frozen=True, slots=True)
class Presence:
    """What was last heard of a nodeagent. `status` None: known from the database, not heard yet."""

    node: str
    heard_at: float
    alive: bool = True
    status: NodeStatus | None = None

    @property
    def key(self) -> str:
        return self.node


@dataclass(frozen=True, slots=True)
class LoaderPresence:
    """What was last heard of a loader."""

    node: str
    heard_at: float
    status: LoaderStatus

    @property
    def resident(self) -> tuple[str, ...]:
        """Revisions whose weights lie whole in the node's memory. A loader names weights by their revision."""
        return tuple(s.weights_id for s in self.status.segments if s.error is None and s.loaded_bytes >= s.total_bytes > 0)

    @property
    def key(self) -> str:
        return self.node


@dataclass(frozen=True, slots=True)
class Seen:
    """An instance as its nodeagent last reported it. `idle_since` None: it is serving. `moved_at`: when its start last got on."""

    instance_id: str
    status: InstanceStatus
    idle_since: float | None
    moved_at: float = 0.0

    @property
    def key(self) -> str:
        return self.instance_id


@dataclass(frozen=True, slots=True)
class GatewayDemand:
    gateway: str
    waiting: int
    in_flight: int
    since: float
    heard_at: float
    traceparents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """What waits for one model, by gateway."""

    model: str
    gateways: tuple[GatewayDemand, ...] = ()

    @property
    def key(self) -> str:
        return self.model

    @property
    def waiting(self) -> int:
        return sum(g.waiting for g in self.gateways)

    @property
    def in_flight(self) -> int:
        return sum(g.in_flight for g in self.gateways)

    @property
    def since(self) -> float | None:
        return min((g.since for g in self.gateways if g.waiting), default=None)

    @property
    def traceparents(self) -> tuple[str, ...]:
        return tuple(t for g in self.gateways if g.waiting for t in g.traceparents)[:32]


@dataclass(frozen=True, slots=True)
class Waiter:
    """An operator's request that is answered later. Of a sleep: which instances it waits for, and what they freed so far."""

    waiter: str
    kind: Literal["wake", "sleep"]
    model: str
    since: float
    instances: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    freed_bytes: int = 0

    @property
    def key(self) -> str:
        return self.waiter


@dataclass(frozen=True, slots=True)
class Unmet:
    """A model that wants more instances than it has. `reason` says what it waits for."""

    model: str
    since: float
    reason: str = ""

    @property
    def key(self) -> str:
        return self.model


@dataclass(frozen=True, slots=True)
class Pressure:
    """Demand exceeds what the model's instances can run at once, since then."""

    model: str
    since: float

    @property
    def key(self) -> str:
        return self.model


@dataclass(frozen=True, slots=True)
class Trouble:
    """Failures of a model in a row. `attempts`: failed starts of the present try; `avoid`: the devices they were on, as node/device."""

    model: str
    attempts: int = 0
    avoid: tuple[str, ...] = ()
    failures: int = 0
    failed_at: float | None = None
    not_before: float = 0.0
    error: ErrorBody | None = None

    @property
    def key(self) -> str:
        return self.model


@dataclass(frozen=True, slots=True)
class Pause:
    """Something not to be asked again before `until`: an instance that was busy, or a device (node/device) that refused a model."""

    subject: str
    until: float

    @property
    def key(self) -> str:
        return self.subject


@dataclass(frozen=True, slots=True)
class Estimate:
    """Milliseconds by phase of starting a model on a node: an exponential moving average of what was measured."""

    model: str
    node: str
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return estimate_key(self.model, self.node)


def estimate_key(model: str, node: str) -> str:
    return f"{model}\0{node}"


@dataclass(frozen=True, slots=True)
class Counter:
    """Commands numbered so far in this epoch."""

    value: int

    @property
    def key(self) -> str:
        return "counter"


Durable = Model | Node | Instance | PlanRecord
Volatile = Presence | LoaderPresence | Seen | ModelDemand | Waiter | Unmet | Pressure | Trouble | Pause | Estimate | Counter
Entity = Durable | Volatile


def key_of(entity: Entity) -> str:
    return entity.plan_id if isinstance(entity, PlanRecord) else entity.key
