"""The entities of the cluster's state. All are frozen: a change replaces a whole entity.

Postgres stores `Model`, `Node`, `Instance`, `PlanRecord`, `Pull` and those of `measurements`. The
others are rebuilt from reports within a second or two of a new leader's start. Times are
seconds on the loop's clock (Unix time at the process's start plus monotonic time since).
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from services.scheduler.domain.state.full_workers import FullWorker
from services.scheduler.domain.state.measurements import Estimate, MeasuredMemory, SloCounts
from services.scheduler.domain.state.migrations import Migration, MigrationTimes
from services.scheduler.domain.state.pulls import Pull
from services.scheduler.domain.state.usage_history import Prefetch, UsageHistory
from services.scheduler.domain.state.volatile import (
    ConsolidationFailures,
    Cooldown,
    Counter,
    Delivery,
    ExpectationSent,
    FailureHistory,
    Fetch,
    InstanceReport,
    KeyShare,
    LaterStage,
    LoaderPresence,
    ModelDemand,
    ModelUsers,
    Overload,
    ParkFailures,
    Presence,
    ShareClock,
    SloQueue,
    Unschedulable,
    Waiter,
)
from services.scheduler.domain.values import value
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState
from shared.contracts.plans import PlanRecord

CONSOLIDATION = "consolidation"
"""Trigger of an instance that takes over from a pipeline group, and reason of its migration."""
MIGRATE = "migrate"
"""Trigger of an instance that was started as the destination of another migration."""
Leaving = Literal["no", "if_idle", "drain", "suspend_if_idle", "suspend"]


@value(frozen=True, slots=True)
class Model:
    """A registered model.

    Attributes:
        sleep_requested: An operator put it to sleep; `replicas.min` holds again from the next
            demand, wake or change of the model.
    """

    card: ModelCard
    error: str | None = None
    sleep_requested: bool = False

    @property
    def key(self) -> str:
        return self.card.spec.name

    @property
    def min_replicas(self) -> int:
        """Return how many instances run without demand."""
        return 0 if self.sleep_requested or self.card.spec.base is not None else self.card.spec.replicas.min


@value(frozen=True, slots=True)
class Device:
    device_id: str
    kind: Literal["cpu", "cuda"]
    name: str
    budget_bytes: int


@value(frozen=True, slots=True)
class Node:
    """A node.

    Attributes:
        drain_since: Time since which it is drained (a drained node is also cordoned).
    """

    name: str
    boot_id: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    cordoned: bool = False
    drain_since: float | None = None

    @property
    def key(self) -> str:
        return self.name


@value(frozen=True, slots=True)
class Instance:
    """The believed and desired state of one instance.

    Attributes:
        sent_at: Time of the start command. None: the instance is a claim, to which memory is
            promised. Its start (of a suspended instance: its resumption) is sent once the nodeagent
            has reported the memory free.
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
    stages: int = 1
    """Stages of a group on several nodes, of which this is the first; 1: all is on `device_ids`."""

    @property
    def key(self) -> str:
        return self.instance_id

    @property
    def is_claim(self) -> bool:
        return self.sent_at is None

    @property
    def is_resume_claim(self) -> bool:
        """True for a claim of a suspended instance that is to resume."""
        return self.is_claim and self.state is InstanceState.RESUMING

    @property
    def label(self) -> str:
        return f"{self.model} ({self.instance_id})"


Durable = Model | Node | Instance | PlanRecord | MeasuredMemory | Estimate | SloCounts | Pull
Volatile = (
    Presence
    | LoaderPresence
    | InstanceReport
    | LaterStage
    | FullWorker
    | Fetch
    | Delivery
    | ModelDemand
    | Waiter
    | Unschedulable
    | Overload
    | KeyShare
    | ModelUsers
    | ShareClock
    | FailureHistory
    | ParkFailures
    | ConsolidationFailures
    | Cooldown
    | Counter
    | UsageHistory
    | Prefetch
    | ExpectationSent
    | SloQueue
    | Migration
    | MigrationTimes
)
Entity = Durable | Volatile


def key_of(entity: Entity) -> str:
    return entity.plan_id if isinstance(entity, PlanRecord) else entity.key
