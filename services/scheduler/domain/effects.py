"""The effects of a decision, as plain data.

One port carries them out after the changes are committed.
"""

from __future__ import annotations

from services.scheduler.domain.values import value
from shared.contracts.base import ErrorBody, Message
from shared.contracts.demand import LoadFailed
from shared.contracts.loader import CancelPrefetch, ExpectModels, PrefetchWeights, PrepareWeights, ReleaseWeights
from shared.contracts.migration import MigrationRecord
from shared.contracts.models import ModelCard
from shared.contracts.node import ResumeInstance, StartInstance, StopInstance, SuspendInstance
from shared.contracts.plans import PlanRecord
from shared.contracts.stages import GroupPlace, LayerRange


@value(frozen=True, slots=True)
class SendStart:
    """Start an instance.

    The sender computes the schedule and reserve phases from `requested_at` and `planned_at`.

    Attributes:
        claimed: Victims had to leave between plan and start.
        place: Place of a stage in a group on several nodes; the sender then adds the group's secret
            to the command.
        layers: Layers of such a stage.
    """

    node: str
    command: StartInstance
    requested_at: float
    planned_at: float
    claimed: bool = False
    place: GroupPlace | None = None
    layers: LayerRange | None = None


@value(frozen=True, slots=True)
class SendResume:
    """Resume a suspended instance; fields as in `SendStart`."""

    node: str
    command: ResumeInstance
    requested_at: float
    planned_at: float
    claimed: bool = False


@value(frozen=True, slots=True)
class SendPrepare:
    node: str
    command: PrepareWeights


@value(frozen=True, slots=True)
class SendRelease:
    """Have the loader release weights that it prepared for an instance that was never started."""

    node: str
    command: ReleaseWeights


@value(frozen=True, slots=True)
class SendPrefetch:
    node: str
    command: PrefetchWeights


@value(frozen=True, slots=True)
class SendCancelPrefetch:
    node: str
    command: CancelPrefetch


@value(frozen=True, slots=True)
class SendExpectation:
    """Notify a loader with separate devices of the models that are expected."""

    node: str
    command: ExpectModels


@value(frozen=True, slots=True)
class SendStop:
    node: str
    command: StopInstance


@value(frozen=True, slots=True)
class SendSuspend:
    node: str
    command: SuspendInstance


@value(frozen=True, slots=True)
class PublishLoadFailed:
    event: LoadFailed


@value(frozen=True, slots=True)
class PutCatalog:
    card: ModelCard


@value(frozen=True, slots=True)
class DeleteCatalog:
    name: str


@value(frozen=True, slots=True)
class ReplyTo:
    """Answer a request with a message or an error."""

    waiter: str
    answer: Message | ErrorBody


@value(frozen=True, slots=True)
class LoadStarted:
    """A plan will be carried out: the load's root span begins, linked with the waiting requests."""

    plan_id: str
    instance_id: str
    model: str
    node: str
    requested_at: float
    waiters: tuple[str, ...]


@value(frozen=True, slots=True)
class LoadEnded:
    """The plan's outcome is known: its span ends and its trace is published.

    Attributes:
        requested_at: Origin of the measured spans, in seconds.
    """

    plan: PlanRecord
    node: str
    requested_at: float
    ended_at: float


@value(frozen=True, slots=True)
class OrderMigration:
    """Write the record to the bucket that migrators watch."""

    record: MigrationRecord


@value(frozen=True, slots=True)
class CancelMigration:
    """Cancel a migration order that no migrator works on, if it is still as in `record`.

    Without effect if the bucket does not answer: owners could then not renew their leases either.
    """

    record: MigrationRecord
    error: ErrorBody


@value(frozen=True, slots=True)
class ForgetNode:
    """Remove what is kept in memory of a node that is gone."""

    node: str


@value(frozen=True, slots=True)
class StepDown:
    """Another leader acted under a newer epoch: lead again only above `epoch`."""

    epoch: int


Effect = (
    SendStart
    | SendResume
    | SendPrepare
    | SendRelease
    | SendPrefetch
    | SendCancelPrefetch
    | SendExpectation
    | SendStop
    | SendSuspend
    | PublishLoadFailed
    | PutCatalog
    | DeleteCatalog
    | ReplyTo
    | LoadStarted
    | LoadEnded
    | OrderMigration
    | CancelMigration
    | ForgetNode
    | StepDown
)
