"""The events that the loop processes; `at` is in seconds on the loop's clock."""

from __future__ import annotations

import math
from typing import Literal

from services.scheduler.domain.values import value
from shared.contracts.base import ErrorBody
from shared.contracts.demand import Demand
from shared.contracts.loader import LoaderStatus
from shared.contracts.migration import MigrationRecord
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelSpec
from shared.contracts.node import NodeStatus
from shared.contracts.objectives import ReportObjectives


@value(frozen=True, slots=True)
class Recovered:
    """The state has been read from the database and a term begins."""

    at: float


@value(frozen=True, slots=True)
class Tick:
    """The timer's event.

    Attributes:
        connected_since: Time since which the scheduler's own connection to NATS works; None: it
            does not.
    """

    at: float
    connected_since: float | None = -math.inf

    def proves_silence(self, within_s: float) -> bool:
        """True if messages that are sent every `within_s` seconds would have arrived."""
        return self.connected_since is not None and self.at - self.connected_since >= within_s


@value(frozen=True, slots=True)
class DemandReceived:
    at: float
    demand: Demand
    waiter: str


@value(frozen=True, slots=True)
class DemandBatch:
    """Demand for several models that arrived during another decision; it is decided together."""

    at: float
    demands: tuple[DemandReceived, ...]


@value(frozen=True, slots=True)
class ObjectivesReported:
    at: float
    report: ReportObjectives
    waiter: str


@value(frozen=True, slots=True)
class NodeStatusReceived:
    """A node's whole status.

    Attributes:
        changed: The instances that differ from the last one; None: any may.
    """

    at: float
    status: NodeStatus
    changed: frozenset[str] | None = None


@value(frozen=True, slots=True)
class LoaderStatusReceived:
    at: float
    status: LoaderStatus


@value(frozen=True, slots=True)
class StartRefused:
    """The nodeagent refused `StartInstance`, or was unreachable."""

    at: float
    instance_id: str
    error: ErrorBody


@value(frozen=True, slots=True)
class StopRefused:
    at: float
    instance_id: str
    error: ErrorBody


@value(frozen=True, slots=True)
class CommandAccepted:
    at: float
    instance_id: str


@value(frozen=True, slots=True)
class AddModelsRequested:
    """Register models.

    Attributes:
        infos: What a loader read of each spec whose source is new or changed, by name.
        replace: A registered model may get another source.
        before: Registered specs that the new ones were made from.
    """

    at: float
    waiter: str
    specs: tuple[ModelSpec, ...]
    infos: dict[str, ModelInfo]
    prune: bool
    replace: bool = False
    before: tuple[ModelSpec, ...] = ()


@value(frozen=True, slots=True)
class RemoveModelRequested:
    at: float
    waiter: str
    name: str
    with_adapters: bool = False


@value(frozen=True, slots=True)
class WakeRequested:
    at: float
    waiter: str
    name: str


@value(frozen=True, slots=True)
class SleepRequested:
    at: float
    waiter: str
    name: str


@value(frozen=True, slots=True)
class PullRequested:
    """Bring the weights of a model to a tier of a node.

    Attributes:
        node: Name of the node; None: the scheduler chooses.
        request_id: Id that repetitions of the request share; empty: none.
    """

    at: float
    waiter: str
    name: str
    node: str | None = None
    tier: Literal["ssd", "dram"] = "ssd"
    request_id: str = ""


@value(frozen=True, slots=True)
class PullCancelRequested:
    """Cancel the pulls of a model.

    Attributes:
        node: None: on all nodes.
        tier: None: in both tiers.
    """

    at: float
    waiter: str
    name: str
    node: str | None = None
    tier: Literal["ssd", "dram"] | None = None


@value(frozen=True, slots=True)
class ChangeNodeRequested:
    at: float
    waiter: str
    node: str
    action: str


@value(frozen=True, slots=True)
class MigrationRequested:
    """Migrate requests of an instance.

    Attributes:
        request_id: None: all its requests.
        node: Destination; empty: any.
        device: Destination; empty: any of the node.
    """

    at: float
    waiter: str
    instance_id: str
    request_id: str | None = None
    node: str = ""
    device: str = ""
    wait: bool = True


@value(frozen=True, slots=True)
class MigrationUpdated:
    """The present record of a migration in the bucket."""

    at: float
    record: MigrationRecord


@value(frozen=True, slots=True)
class WaiterCancelled:
    """The requester has stopped waiting for its answer."""

    at: float
    waiter: str


AdminRequested = AddModelsRequested | RemoveModelRequested | WakeRequested | SleepRequested | ChangeNodeRequested
Event = (
    Recovered
    | Tick
    | DemandReceived
    | DemandBatch
    | ObjectivesReported
    | NodeStatusReceived
    | LoaderStatusReceived
    | StartRefused
    | StopRefused
    | CommandAccepted
    | AdminRequested
    | PullRequested
    | PullCancelRequested
    | MigrationRequested
    | MigrationUpdated
    | WaiterCancelled
)
