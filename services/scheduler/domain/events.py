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
class DemandHeard:
    at: float
    demand: Demand
    waiter: str


@value(frozen=True, slots=True)
class DemandsHeard:
    """Demand for several models that was heard while something else was decided: it is decided together."""

    at: float
    heard: tuple[DemandHeard, ...]


@value(frozen=True, slots=True)
class NodeStatusHeard:
    at: float
    status: NodeStatus


@value(frozen=True, slots=True)
class LoaderStatusHeard:
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
class AddModelsAsked:
    """`infos`: what a loader read of each spec whose source is new or changed, by name."""

    at: float
    waiter: str
    specs: tuple[ModelSpec, ...]
    infos: dict[str, ModelInfo]
    prune: bool


@value(frozen=True, slots=True)
class RemoveModelAsked:
    at: float
    waiter: str
    name: str
    with_adapters: bool = False


@value(frozen=True, slots=True)
class WakeAsked:
    at: float
    waiter: str
    name: str


@value(frozen=True, slots=True)
class SleepAsked:
    at: float
    waiter: str
    name: str


@value(frozen=True, slots=True)
class ChangeNodeAsked:
    at: float
    waiter: str
    node: str
    action: str


@value(frozen=True, slots=True)
class MigrateAsked:
    """`request_id` None: everything that the instance serves. `node` and `device` empty: wherever."""

    at: float
    waiter: str
    instance_id: str
    request_id: str | None = None
    node: str = ""
    device: str = ""
    wait: bool = True


@value(frozen=True, slots=True)
class MigrationHeard:
    """The record of a migration, as it is in the bucket now."""

    at: float
    record: MigrationRecord


@value(frozen=True, slots=True)
class WaiterGone:
    """Whoever asked waits no longer."""

    at: float
    waiter: str


AdminAsked = AddModelsAsked | RemoveModelAsked | WakeAsked | SleepAsked | ChangeNodeAsked
Event = (
    Recovered
    | Tick
    | DemandHeard
    | DemandsHeard
    | NodeStatusHeard
    | LoaderStatusHeard
    | StartRefused
    | StopRefused
    | CommandAccepted
    | AdminAsked
    | MigrateAsked
    | MigrationHeard
    | WaiterGone
)
