"""Define operators' requests to the scheduler.

They arrive through a gateway's admin API or over NATS.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from shared.contracts.base import Deadline, Frozen, Message, Request
from shared.contracts.loader import DeviceMemory, LinkStatus
from shared.contracts.migration import MigrationRecord, RequestFound
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import Capability, DeviceStatus, InstanceStatus
from shared.contracts.plans import PlanRecord
from shared.contracts.traces import RequestTrace
from shared.contracts.usage import ViewUsage


class AddModels(Request):
    """Register or change models, all or none.

    With `prune`, models not named are removed (their instances drain). `reread`: the files of those
    that are registered with the same spec are read again too, and changes there take effect.
    """

    deadline_ms: Deadline = 300_000
    kind: Literal["add_models"] = "add_models"
    specs: tuple[ModelSpec, ...]
    prune: bool = False
    reread: bool = False
    replace: bool = Field(
        default=False, description="Allow another source for a model that is registered; without it the request is a conflict."
    )
    before: tuple[ModelSpec, ...] = Field(
        default=(),
        description="Registered specs that the new ones were made from. If one has changed meanwhile, the request is a conflict.",
    )


class ModelsAdded(Message):
    kind: Literal["models_added"] = "models_added"
    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class ChangeSettings(Frozen):
    """The body of a change of a model's settings.

    Attributes:
        settings: New values by name, as in `ModelSpec`; null stands for the default.
        dry_run: List the changes only.
        version: That of an earlier answer; the change is a conflict if the settings differ since.
    """

    settings: dict[str, Any] = Field(max_length=64)
    dry_run: bool = False
    version: str | None = None


class SettingChange(Frozen):
    setting: str
    before: Any
    after: Any


class SettingsChanged(Frozen):
    """The settings of a model that differ, and whether they have been changed."""

    name: str
    version: str = Field(description="Of the settings before the change.")
    changes: tuple[SettingChange, ...] = ()
    is_applied: bool = False


class RemoveModel(Request):
    """A model that has adapters is only removed together with them, `with_adapters`."""

    kind: Literal["remove_model"] = "remove_model"
    name: str
    with_adapters: bool = False


class WakeModel(Request):
    """Make the model ready; answers when it is (`ModelAwake`), or why not."""

    deadline_ms: Deadline = 600_000
    kind: Literal["wake"] = "wake"
    name: str


class ModelAwake(Message):
    kind: Literal["awake"] = "awake"
    instance_id: str
    plan_id: str | None = None
    took_ms: float = 0.0


class SleepModel(Request):
    """Free the devices of every instance of the model, after its running requests.

    The reply follows when all instances have left their devices.
    """

    deadline_ms: Deadline = 120_000
    kind: Literal["sleep"] = "sleep"
    name: str


class ModelAsleep(Message):
    kind: Literal["model_asleep"] = "model_asleep"
    instances: tuple[str, ...] = ()
    freed_bytes: int = 0


class PullOptions(Frozen):
    """The body of a pull.

    Attributes:
        node: None: the scheduler chooses.
        tier: Disk cache (ssd) or host memory (dram) of the node.
    """

    node: str | None = Field(default=None, min_length=1)
    tier: Literal["ssd", "dram"] = "ssd"


class PullModel(Request):
    """Bring a model's weights to a tier of a node, without starting an instance.

    Answers when they are there (`ModelPulled`), or why not. The pull continues after the deadline.
    The request is idempotent: a repeated one waits for the same pull, and with the same
    `request_id` it gets the answer of a pull that has ended in the meantime.
    """

    deadline_ms: Deadline = 600_000
    kind: Literal["pull"] = "pull"
    name: str
    options: PullOptions = PullOptions()
    request_id: str = Field(default="", max_length=64, description="The same in all repetitions of a request; empty: none.")


class ModelPulled(Message):
    """The place of the weights after a pull.

    Attributes:
        tiers: All tiers of the node that have them.
        took_ms: Since the first request for this pull; 0 if the weights were there.
    """

    kind: Literal["pulled"] = "pulled"
    name: str
    node: str
    tier: Literal["ssd", "dram"]
    tiers: tuple[Literal["ssd", "dram"], ...] = ()
    nbytes: int = 0
    took_ms: float = 0.0
    was_there: bool = False


class CancelPulls(Request):
    """Cancel the pulls of a model that are in progress, on all nodes and tiers or on those named.

    The requests that wait for them fail with `PullCancelled`. Without such a pull nothing changes.
    """

    kind: Literal["cancel_pulls"] = "cancel_pulls"
    name: str
    node: str | None = Field(default=None, min_length=1)
    tier: Literal["ssd", "dram"] | None = None


class PullTarget(Frozen):
    """The tier of a node that a pull brings weights to."""

    node: str
    tier: Literal["ssd", "dram"]


class PullsCancelled(Message):
    """The pulls that were cancelled; empty if none was in progress."""

    kind: Literal["pulls_cancelled"] = "pulls_cancelled"
    name: str
    cancelled: tuple[PullTarget, ...] = ()


class PullView(Frozen):
    """A pull in progress.

    States:
        running: The loader of the node loads the weights.
        waiting: For loads that go first, or for the loader; `reason` says which.
    """

    model: str
    node: str
    tier: Literal["ssd", "dram"]
    state: Literal["running", "waiting"]
    reason: str = ""
    since: float = Field(description="Unix seconds of the first request for it.")
    loaded_bytes: int = Field(default=0, description="Bytes that have arrived on the node.")
    total_bytes: int
    bytes_per_second: float | None = Field(default=None, description="Of the last seconds; None: not measured yet.")


class AssumeNode(Frozen):
    """A hypothetical additional node.

    Without `devices` or `bytes` it has the devices or memory of the first node of the mesh.
    """

    kind: Literal["add_node"] = "add_node"
    node: str = Field(min_length=1)
    devices: int | None = Field(default=None, gt=0, le=64)
    nbytes: int | None = Field(default=None, gt=0, description="Budget of each of its devices.")


class AssumeBudget(Frozen):
    """A hypothetical budget of a device."""

    kind: Literal["budget"] = "budget"
    node: str
    device: str
    nbytes: int = Field(ge=0)


class AssumeNoNode(Frozen):
    """A hypothetical loss of a node and its instances."""

    kind: Literal["drop_node"] = "drop_node"
    node: str


Assumption = Annotated[AssumeNode | AssumeBudget | AssumeNoNode, Field(discriminator="kind")]


class ExplainPlan(Request):
    """Explain a placement decision.

    The request names one of: a model (by name or alias: its last decision), a plan, or a request
    (the decision it waited for). `about` may be any of these. With `what_if` the scheduler starts
    nothing: it answers with the plan it would make for the model now under that assumption.
    """

    kind: Literal["explain"] = "explain"
    model: str | None = None
    plan_id: str | None = None
    request_id: str | None = None
    about: str | None = None
    what_if: tuple[Assumption, ...] = Field(default=(), max_length=64)


class QueuePlace(Frozen):
    """Position of a model in the queue for memory; models are placed in this order."""

    position: int = Field(ge=1)
    length: int = Field(ge=1)
    waiting: int = Field(default=0, description="Its requests that wait.")
    since_ms: float = Field(default=0.0, description="How long it has waited.")
    reason: str = ""
    before: tuple[str, ...] = Field(default=(), description="Models before it, at most ten.")


class PlanExplained(Message):
    kind: Literal["plan"] = "plan"
    plan: PlanRecord
    queue: QueuePlace | None = Field(default=None, description="Of its model, if that waits now.")
    request: RequestTrace | None = Field(default=None, description="The request that was asked about, if it is over.")
    running: RequestFound | None = Field(default=None, description="The request that was asked about, if it is not over yet.")
    assumed: tuple[str, ...] = Field(default=(), description="What was taken for granted, in words: the plan is then hypothetical.")
    others: tuple[PlanRecord, ...] = Field(default=(), description="Other models that would start by the same decision.")
    runs_already: bool = Field(
        default=False, description="Under `assumed` the model has an instance: nothing would start, and the plan is of one more."
    )


class ChangeNode(Request):
    """Cordon: no new instances.

    Drain: cordon, and every instance leaves as soon as it is idle or its drain time is over.
    Remove: of a lost node; no other is removed.
    """

    kind: Literal["change_node"] = "change_node"
    node: str
    action: Literal["cordon", "uncordon", "drain", "remove"]


class ViewCluster(Request):
    """View all models and nodes.

    A brief view leaves out the candidates and measured phases of the models' last plans, which are
    most of its bytes in a large cluster.
    """

    kind: Literal["view"] = "view"
    brief: bool = False


class LoadView(Frozen):
    """A load of a model's weights that is not complete.

    Attributes:
        total_bytes: 0: not known yet.
        fetched_bytes: Received from a remote source.
        on_devices: Bytes on each device that the weights are brought to.
    """

    model: str
    total_bytes: int
    loaded_bytes: int
    fetched_bytes: int = 0
    on_devices: dict[str, int] = Field(default_factory=dict)


class LoaderView(Frozen):
    """The budgets of a node's loader, what it uses of them, and its bandwidths."""

    dram_budget_bytes: int = 0
    dram_bytes: int = Field(default=0, description="As in `LoaderStatus`: without what instances hold.")
    ssd_budget_bytes: int = 0
    ssd_bytes: int = Field(default=0, description="As in `LoaderStatus`.")
    bytes_per_second: float | None = Field(default=None, description="Measured by the latest loads.")
    links: tuple[LinkStatus, ...] = ()
    memory: tuple[DeviceMemory, ...] = Field(default=(), description="Of devices that keep units.")
    loads: tuple[LoadView, ...] = Field(default=(), description="Loads in progress.")


class NodeView(Frozen):
    node: str
    alive: bool
    cordoned: bool = False
    loader_alive: bool = False
    last_seen_ms: int | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    devices: tuple[DeviceStatus, ...] = ()
    instances: tuple[InstanceStatus, ...] = ()
    snapshot_budget_bytes: int = Field(default=0, description="Of host memory and swap, for suspended instances.")
    loader: LoaderView | None = Field(default=None, description="None: its loader has not reported.")
    capabilities: tuple[Capability, ...] = Field(default=(), description="What its nodeagent can do, or why it cannot.")


class ParkView(Frozen):
    """Progress of suspending a model with `park` before its first request.

    States:
        queued: The model is in the queue; no action is needed.
        waiting: The model waits for memory.
        up: A request has started the model already.
        impossible: The model cannot be suspended, so no instance is started for it.
    """

    state: Literal["queued", "waiting", "starting", "suspending", "parked", "up", "failed", "impossible"]
    reason: str = ""

    @property
    def moving(self) -> bool:
        return self.state in ("queued", "starting", "suspending")


class ObjectiveView(Frozen):
    """The requests of the last day that met a model's objective (`slo`).

    Attributes:
        total: Requests that count.
        met: Requests that met the objective.
        required: Requests that must meet it in a row until the model complies (RRC of Torpor §5.2);
            0 or less: it complies.
    """

    total: int
    met: int
    percentile: float
    required: float


class ModelView(Frozen):
    """A model, its queue, and its last plan.

    Attributes:
        error: The reason why the last attempt to make the model ready failed, until an attempt
            succeeds.
    """

    card: ModelCard
    waiting: int = 0
    last_plan: PlanRecord | None = None
    error: str | None = None
    objective: ObjectiveView | None = Field(default=None, description="Of a model with an objective that has served requests.")
    park: ParkView | None = Field(default=None, description="Of a model that is to be parked ahead of its first request.")


class ClusterView(Message):
    kind: Literal["cluster"] = "cluster"
    scheduler: str
    epoch: int
    models: tuple[ModelView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    policy: str | None = Field(default=None, description="Name of the scheduling policy; None: of an older scheduler.")
    pulls: tuple[PullView, ...] = Field(default=(), description="Pulls in progress, the earliest first.")

    def without_secrets(self) -> ClusterView:
        """Return the view for callers who may see, not change."""
        models = tuple(m.model_copy(update={"card": m.card.without_secrets()}) for m in self.models)
        return self.model_copy(update={"models": models})


class Migrate(Request):
    """Move one or all requests of an instance to another instance of the model.

    The target is a ready instance of the same model on `node` (`device`); the scheduler starts one
    there if necessary. Without `node` the scheduler chooses. The reply is `MigrationsViewed`: at
    the end with `wait`, else as soon as the migration is ordered.
    """

    deadline_ms: Deadline = 600_000
    kind: Literal["migrate"] = "migrate"
    request_id: str | None = None
    instance_id: str | None = None
    node: str | None = None
    device: str | None = None
    wait: bool = True


class ViewMigrations(Request):
    """Migrations in progress, and those of the last hour, the latest first."""

    kind: Literal["view_migrations"] = "view_migrations"
    migration_id: str | None = None
    limit: int = Field(default=50, gt=0, le=1000)


class MigrationsViewed(Message):
    kind: Literal["migrations"] = "migrations"
    migrations: tuple[MigrationRecord, ...] = ()


AdminRequest = Annotated[
    AddModels
    | RemoveModel
    | WakeModel
    | SleepModel
    | PullModel
    | CancelPulls
    | ExplainPlan
    | ChangeNode
    | ViewCluster
    | Migrate
    | ViewMigrations
    | ViewUsage,
    Field(discriminator="kind"),
]
ADMIN_REQUEST: TypeAdapter[AdminRequest] = TypeAdapter(AdminRequest)
