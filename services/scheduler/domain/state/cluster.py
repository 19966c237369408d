"""The cluster's state in memory. Only the scheduler's loop changes it."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.port import Keep
from services.scheduler.domain.state.booking import Booking, device_key
from services.scheduler.domain.state.booking_index import BookingTable, DueTimes
from services.scheduler.domain.state.entities import Instance, Model, Node
from services.scheduler.domain.state.full_workers import FullWorker
from services.scheduler.domain.state.measurements import Estimate, MeasuredMemory, SloCounts
from services.scheduler.domain.state.migrations import Migration, MigrationTimes
from services.scheduler.domain.state.overlay import Overlay
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
from shared.contracts.plans import PlanRecord

V = TypeVar("V")
Table = MutableMapping[str, V]


@dataclass
class ClusterState:
    """Tables of frozen entities by key, and the indexes that `apply` (changes.py) maintains."""

    epoch: int
    recovered_at: float = 0.0
    models: Table[Model] = field(default_factory=dict)
    nodes: Table[Node] = field(default_factory=dict)
    instances: Table[Instance] = field(default_factory=dict)
    plans: Table[PlanRecord] = field(default_factory=dict)
    presence: Table[Presence] = field(default_factory=dict)
    loaders: Table[LoaderPresence] = field(default_factory=dict)
    reports: Table[InstanceReport] = field(default_factory=dict)
    later_stages: Table[LaterStage] = field(default_factory=dict)
    full_workers: Table[FullWorker] = field(default_factory=dict)
    fetches: Table[Fetch] = field(default_factory=dict)
    deliveries: Table[Delivery] = field(default_factory=dict)
    demand: Table[ModelDemand] = field(default_factory=dict)
    waiters: Table[Waiter] = field(default_factory=dict)
    unschedulable: Table[Unschedulable] = field(default_factory=dict)
    overload: Table[Overload] = field(default_factory=dict)
    key_shares: Table[KeyShare] = field(default_factory=dict)
    model_users: Table[ModelUsers] = field(default_factory=dict)
    share_clock: Table[ShareClock] = field(default_factory=dict)
    failures: Table[FailureHistory] = field(default_factory=dict)
    park_failures: Table[ParkFailures] = field(default_factory=dict)
    consolidation_failures: Table[ConsolidationFailures] = field(default_factory=dict)
    measured: Table[MeasuredMemory] = field(default_factory=dict)
    cooldowns: Table[Cooldown] = field(default_factory=dict)
    estimates: Table[Estimate] = field(default_factory=dict)
    counter: Table[Counter] = field(default_factory=dict)
    usage_history: Table[UsageHistory] = field(default_factory=dict)
    prefetches: Table[Prefetch] = field(default_factory=dict)
    pulls: Table[Pull] = field(default_factory=dict)
    expectations: Table[ExpectationSent] = field(default_factory=dict)
    slo_counts: Table[SloCounts] = field(default_factory=dict)
    slo_queue: Table[SloQueue] = field(default_factory=dict)
    migrations: Table[Migration] = field(default_factory=dict)
    migration_times: Table[MigrationTimes] = field(default_factory=dict)
    # Indexes: instance ids by model, node and device (node/device), and nodes by their weights.
    aliases: Table[str] = field(default_factory=dict)
    last_plan: Table[str] = field(default_factory=dict)
    kept_running: Table[bool] = field(default_factory=dict)
    to_park: Table[bool] = field(default_factory=dict)
    """Models that are to be parked and have no instance."""
    anti_affine: Table[bool] = field(default_factory=dict)
    """Models with anti-affinity rules."""
    by_model: Table[tuple[str, ...]] = field(default_factory=dict)
    by_node: Table[tuple[str, ...]] = field(default_factory=dict)
    by_device: Table[tuple[str, ...]] = field(default_factory=dict)
    stages_on: Table[tuple[str, ...]] = field(default_factory=dict)
    """By device (node/device): later stages of groups on several nodes."""
    stages_of: Table[tuple[str, ...]] = field(default_factory=dict)
    """By first instance: the later stages of its group on several nodes."""
    promised_on: Table[tuple[str, ...]] = field(default_factory=dict)
    """By device (node/device): the full workers of groups."""
    in_memory: Table[tuple[str, ...]] = field(default_factory=dict)
    """By revision: nodes whose loaders have all its weights in memory."""
    on_disk: Table[tuple[str, ...]] = field(default_factory=dict)
    """By revision: nodes whose loaders have its files on disk."""
    has_units: Table[tuple[str, ...]] = field(default_factory=dict)
    """By revision: nodes with a separate device that has some of its units."""
    expecting: Table[tuple[str, ...]] = field(default_factory=dict)
    """By group (prewarm/expectations.py): nodes whose loaders have separate devices."""
    fetches_on: Table[tuple[str, ...]] = field(default_factory=dict)
    """By node: the holders of weights that it fetches from remote sources."""
    loading_on: Table[tuple[str, ...]] = field(default_factory=dict)
    """By node: instances whose weights are being loaded there."""
    links_busy_until: Table[float] = field(default_factory=dict)
    """By node: when the queue of its links will be empty. Nodes with idle links are absent."""
    measured_on: Table[tuple[str, ...]] = field(default_factory=dict)
    """By model: nodes with an estimate of their own."""
    by_template: Table[tuple[str, ...]] = field(default_factory=dict)
    """By template key: suspended instances whose engines other models may take."""
    bookings: Table[Booking] = field(default_factory=BookingTable)
    deadlines: Table[float] = field(default_factory=DueTimes)
    """By instance: when the passing of time may next change it. The timer skips all others."""
    claimed: Table[tuple[str, str]] = field(default_factory=dict)
    """Devices that claims wait for, as (node, device)."""
    keep_alive_rule: Keep = field(default=thaw.keep, compare=False, repr=False)
    """The profile's keep-alive rule; set it with `with_keep_alive`."""
    borrowed: set[str] = field(default_factory=set, compare=False, repr=False)
    """In an overlay: the tables that are still shared with the state below."""

    def fork(self) -> ClusterState:
        """Return an independent copy. Entities are frozen and shared."""
        tables: dict[str, Any] = {name: dict(self.__dict__[name]) for name in _MAPPINGS}
        copied = ClusterState(self.epoch, self.recovered_at, **tables, keep_alive_rule=self.keep_alive_rule)
        copied.bookings = BookingTable(self.bookings.items())
        copied.deadlines = DueTimes(self.deadlines.items())
        return copied

    def overlay(self) -> ClusterState:
        """Return a copy-on-write view at no cost, valid while this state does not change."""
        above = object.__new__(ClusterState)
        above.__dict__.update(self.__dict__)
        above.borrowed = set(_ALL)
        return above

    def get_writable(self, name: str) -> Table[Any]:
        """Return the table or index of that name for writing."""
        found: Table[Any] = self.__dict__[name]
        if name in self.borrowed:
            self.borrowed.discard(name)
            self.__dict__[name] = found = Overlay(found)
        return found

    def absorb(self, above: ClusterState) -> None:
        """Merge the writes of `above`, an overlay of this state, without recomputing indexes."""
        for name in _ALL - above.borrowed:  # in any order: tables do not depend on each other
            written: Overlay[Any] = above.__dict__[name]
            written.write_to(self.get_writable(name))

    def keep_alive_s(self, i: Instance, model: Model) -> float:
        """Return the seconds that an idle instance is kept; -1: until it is evicted."""
        took = i.ready_at - i.planned_at if i.ready_at is not None else 0.0
        return self.keep_alive_rule(model.card.spec.keep_alive, max(0.0, took))

    def model_named(self, name: str) -> Model | None:
        """Return a model by name or alias."""
        return self.models.get(name) or self.models.get(self.aliases.get(name, ""))

    def serving_model(self, name: str) -> Model | None:
        """Return the model whose instances serve `name`: a model, a LoRA adapter, or
        `base:adapter`.
        """
        prefix, _, last = name.rpartition(":")
        model = self.model_named(last)
        if model is None or model.card.spec.base is None:
            return None if prefix else model
        base = self.models.get(model.card.spec.base)
        return base if not prefix or self.model_named(prefix) is base else None

    def of_model(self, name: str) -> list[Instance]:
        return [self.instances[i] for i in self.by_model.get(name, ())]

    def on_node(self, node: str) -> list[Instance]:
        return [self.instances[i] for i in self.by_node.get(node, ())]

    def on_device(self, node: str, device_id: str) -> list[Instance]:
        return [self.instances[i] for i in self.by_device.get(device_key(node, device_id), ())]

    def stages_behind(self, instance_id: str) -> list[LaterStage]:
        """Return the later stages of a group on several nodes, in order; none: it has none."""
        found = [self.later_stages[s] for s in self.stages_of.get(instance_id, ())]
        return sorted(found, key=lambda s: s.index) if len(found) > 1 else found

    def find_drained_node(self, i: Instance) -> Node | None:
        """Return the drained node that an instance or a later stage of it is on; None: none is."""
        names = (i.node, *(s.node for s in self.stages_behind(i.instance_id))) if i.stages > 1 else (i.node,)
        found = (self.nodes.get(name) for name in names)
        return next((node for node in found if node is not None and node.drain_since is not None), None)

    def fetches_of(self, node: str) -> list[Fetch]:
        return [self.fetches[holder] for holder in self.fetches_on.get(node, ())]

    def devices_of(self, i: Instance) -> list[str]:
        """Return the devices (node/device) of an instance, those of its later stages included."""
        later = [device_key(s.node, s.device_id) for s in self.stages_behind(i.instance_id)]
        return [*(device_key(i.node, device) for device in i.device_ids), *later]

    def holders_on(self, node: str, device_id: str) -> list[Instance]:
        """Return the instances on a device, and those with a later stage on it."""
        found = self.on_device(node, device_id)
        stages = self.stages_on.get(device_key(node, device_id), ())
        return found + [i for s in stages if (i := self.instances.get(self.later_stages[s].first)) is not None]

    def live_instances(self, model: Model) -> list[Instance]:
        """Return instances of the present generation that run or start, and are not to stop."""
        generation = model.card.generation
        return [i for i in self.of_model(model.key) if i.leaving == "no" and i.generation == generation and not i.state.parked]

    def suspended_instances(self, model: Model) -> list[Instance]:
        """Return suspended instances of the present generation that may resume."""
        generation = model.card.generation
        return [i for i in self.of_model(model.key) if i.state.parked and i.leaving == "no" and i.generation == generation]

    def waiting_count(self, model: str) -> int:
        """Return the number of requests and operators that wait for the model."""
        demand = self.demand.get(model)
        waiting = demand.waiting if demand else 0
        if self.waiters:
            waiting += sum(1 for w in self.waiters.values() if w.model == model and w.kind == "wake")
        return waiting

    def last_plan_of(self, model: str) -> PlanRecord | None:
        return self.plans.get(self.last_plan.get(model, ""))

    def inbound_migration(self, instance_id: str) -> Migration | None:
        """Return the migration whose destination is this instance."""
        return next((m for m in self.migrations.values() if m.destination == instance_id), None) if self.migrations else None

    def is_loader_alive(self, node: str, now: float, within: float) -> bool:
        loader = self.loaders.get(node)
        return loader is not None and now - loader.last_message_at <= within


_MAPPINGS = tuple(f.name for f in fields(ClusterState) if f.name not in ("epoch", "recovered_at", "keep_alive_rule", "borrowed"))
_ALL = frozenset(_MAPPINGS)
