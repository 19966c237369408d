"""What the loop hears. Each says when (`at`, seconds on the loop's clock)."""

from __future__ import annotations

from services.scheduler.domain.values import value
from shared.contracts.base import ErrorBody
from shared.contracts.demand import Demand
from shared.contracts.loader import LoaderStatus
from shared.contracts.migration import MigrationRecord
from shared.contracts.models import ModelInfo, ModelSpec
from shared.contracts.node import NodeStatus


@value(frozen=True, slots=True)
class Recovered:
    """The state was read back from the database; a term begins."""

    at: float


@value(frozen=True, slots=True)
class Tick:
    at: float


@value(frozen=True, slots=True)
class DemandReceived:
    at: float
    demand: Demand
    waiter: str


@value(frozen=True, slots=True)
class DemandBatch:
    """Demand for several models that was heard while something else was decided: it is decided together."""

    at: float
    demands: tuple[DemandReceived, ...]


@value(frozen=True, slots=True)
class NodeStatusReceived:
    at: float
    status: NodeStatus


@value(frozen=True, slots=True)
class LoaderStatusReceived:
    at: float
    status: LoaderStatus


@value(frozen=True, slots=True)
class StartRefused:
    """The nodeagent refused `StartInstance`, or could not be reached."""

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
    """`infos`: what a loader read of each spec whose source is new or changed, by name."""

    at: float
    waiter: str
    specs: tuple[ModelSpec, ...]
    infos: dict[str, ModelInfo]
    prune: bool


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
class ChangeNodeRequested:
    at: float
    waiter: str
    node: str
    action: str


@value(frozen=True, slots=True)
class MigrationRequested:
    """`request_id` None: everything that the instance serves. `node` and `device` empty: wherever."""

    at: float
    waiter: str
    instance_id: str
    request_id: str | None = None
    node: str = ""
    device: str = ""
    wait: bool = True


@value(frozen=True, slots=True)
class MigrationUpdated:
    """The record of a migration, as it is in the bucket now."""

    at: float
    record: MigrationRecord


@value(frozen=True, slots=True)
class WaiterCancelled:
    """Whoever asked waits no longer."""

    at: float
    waiter: str


AdminRequested = AddModelsRequested | RemoveModelRequested | WakeRequested | SleepRequested | ChangeNodeRequested
Event = (
    Recovered
    | Tick
    | DemandReceived
    | DemandBatch
    | NodeStatusReceived
    | LoaderStatusReceived
    | StartRefused
    | StopRefused
    | CommandAccepted
    | AdminRequested
    | MigrationRequested
    | MigrationUpdated
    | WaiterCancelled
)
