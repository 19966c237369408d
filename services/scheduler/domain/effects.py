"""What a decision has sent, as plain data. One port carries it out after the changes are committed."""

from __future__ import annotations

from services.scheduler.domain.values import value
from shared.contracts.base import ErrorBody, Message
from shared.contracts.demand import LoadFailed
from shared.contracts.loader import CancelPrefetch, PrefetchWeights, PrepareWeights, ReleaseWeights
from shared.contracts.migration import MigrationRecord
from shared.contracts.models import ModelCard
from shared.contracts.node import ResumeInstance, StartInstance, StopInstance, SuspendInstance
from shared.contracts.plans import PlanRecord


@value(frozen=True, slots=True)
class SendStart:
    """`requested_at` and `planned_at`: from them the sender measures the schedule and reserve phases. `claimed`: victims had to leave
    between plan and start."""

    node: str
    command: StartInstance
    requested_at: float
    planned_at: float
    claimed: bool = False


@value(frozen=True, slots=True)
class SendResume:
    """As `SendStart`, for an instance that is suspended."""

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
    """Have the loader let go of weights that were prepared for an instance that never came to be."""

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
    """Answer a request: with a message, or with an error."""

    waiter: str
    answer: Message | ErrorBody


@value(frozen=True, slots=True)
class LoadStarted:
    """A plan will be carried out: its load's root span begins, linked with those who wait."""

    plan_id: str
    instance_id: str
    model: str
    node: str
    requested_at: float
    waiters: tuple[str, ...]


@value(frozen=True, slots=True)
class LoadEnded:
    """The plan's outcome is known: its span ends and its trace is published. `requested_at` is the origin of its measured spans."""

    plan: PlanRecord
    node: str
    requested_at: float
    ended_at: float


@value(frozen=True, slots=True)
class OrderMigration:
    """Write the record where migrators find it."""

    record: MigrationRecord


@value(frozen=True, slots=True)
class CancelMigration:
    """Cancel an order that no migrator has taken up."""

    migration_id: str
    error: ErrorBody


@value(frozen=True, slots=True)
class StepDown:
    """Someone acted under a newer epoch than this leader's: lead again only above `epoch`."""

    epoch: int


Effect = (
    SendStart
    | SendResume
    | SendPrepare
    | SendRelease
    | SendPrefetch
    | SendCancelPrefetch
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
    | StepDown
)
