"""The cluster as the leader knows it. Owned and mutated by the scheduler's loop only."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.port import Keep
from services.scheduler.domain.state.booking import Booking, device_key
from services.scheduler.domain.state.booking_index import BookingTable, DueTimes
from services.scheduler.domain.state.entities import Instance, Model, Node
from services.scheduler.domain.state.migrations import Migration, MigrationTimes
from services.scheduler.domain.state.overlay import Overlay
from services.scheduler.domain.state.usage_history import Prefetch, UsageHistory
from services.scheduler.domain.state.volatile import (
    Cooldown,
    Counter,
    Estimate,
    FailureHistory,
    InstanceReport,
    LoaderPresence,
    MeasuredMemory,
    ModelDemand,
    Overload,
    ParkFailures,
    Presence,
    SloCounts,
    SloQueue,
    Unschedulable,
    Waiter,
)
from shared.contracts.plans import PlanRecord

V = TypeVar("V")
Table = MutableMapping[str, V]


@dataclass
class ClusterState:
    """Tables of frozen entities by key, and indexes that `apply` (changes.py) keeps (indexes.py)."""

    epoch: int
    recovered_at: float = 0.0
    models: Table[Model] = field(default_factory=dict)
    nodes: Table[Node] = field(default_factory=dict)
    instances: Table[Instance] = field(default_factory=dict)
    plans: Table[PlanRecord] = field(default_factory=dict)
    presence: Table[Presence] = field(default_factory=dict)
    loaders: Table[LoaderPresence] = field(default_factory=dict)
    reports: Table[InstanceReport] = field(default_factory=dict)
    demand: Table[ModelDemand] = field(default_factory=dict)
    waiters: Table[Waiter] = field(default_factory=dict)
    unschedulable: Table[Unschedulable] = field(default_factory=dict)
    overload: Table[Overload] = field(default_factory=dict)
    failures: Table[FailureHistory] = field(default_factory=dict)
    park_failures: Table[ParkFailures] = field(default_factory=dict)
    measured: Table[MeasuredMemory] = field(default_factory=dict)
    cooldowns: Table[Cooldown] = field(default_factory=dict)
    estimates: Table[Estimate] = field(default_factory=dict)
    counter: Table[Counter] = field(default_factory=dict)
    usage_history: Table[UsageHistory] = field(default_factory=dict)
    prefetches: Table[Prefetch] = field(default_factory=dict)
    slo_counts: Table[SloCounts] = field(default_factory=dict)
    slo_queue: Table[SloQueue] = field(default_factory=dict)
    migrations: Table[Migration] = field(default_factory=dict)
    migration_times: Table[MigrationTimes] = field(default_factory=dict)
    # Indexes. Ids of instances by model, by node and by device (node/device); nodes by what they hold or were measured with.
    aliases: Table[str] = field(default_factory=dict)
    last_plan: Table[str] = field(default_factory=dict)
    kept_running: Table[bool] = field(default_factory=dict)
    to_park: Table[bool] = field(default_factory=dict)
    """Models that are to be parked ahead of their first request and have no instance."""
    anti_affine: Table[bool] = field(default_factory=dict)
    """Models that share no node with some others."""
    by_model: Table[tuple[str, ...]] = field(default_factory=dict)
    by_node: Table[tuple[str, ...]] = field(default_factory=dict)
    by_device: Table[tuple[str, ...]] = field(default_factory=dict)
    in_memory: Table[tuple[str, ...]] = field(default_factory=dict)
    """By revision: nodes whose loaders hold its weights, whole."""
    on_disk: Table[tuple[str, ...]] = field(default_factory=dict)
    """By revision: nodes whose loaders have its files on disk."""
    loading_on: Table[tuple[str, ...]] = field(default_factory=dict)
    """By node: instances whose weights are to be brought there."""
    links_busy_until: Table[float] = field(default_factory=dict)
    """By node: when what its links have to bring will have come. Nodes with idle links are left out."""
    measured_on: Table[tuple[str, ...]] = field(default_factory=dict)
    """By model: nodes with an estimate of their own."""
    bookings: Table[Booking] = field(default_factory=BookingTable)
    deadlines: Table[float] = field(default_factory=DueTimes)
    """By instance: from when on the mere passing of time may change something for it; those without one are left alone by the timer."""
    claimed: Table[tuple[str, str]] = field(default_factory=dict)
    """Devices that instances wait for, as (node, device)."""
    keep_alive_rule: Keep = field(default=thaw.keep, compare=False, repr=False)
    """How long idle instances stay: the profile's. Whoever makes a state for another profile says so (`with_keep_alive`)."""
    borrowed: set[str] = field(default_factory=set, compare=False, repr=False)
    """Of an overlay: the tables that nothing was written to, which are still those of the state below."""

    def fork(self) -> ClusterState:
        """A copy that can be changed without changing this one (entities are frozen and shared)."""
        tables: dict[str, Any] = {name: dict(self.__dict__[name]) for name in _MAPPINGS}
        copied = ClusterState(self.epoch, self.recovered_at, **tables, keep_alive_rule=self.keep_alive_rule)
        copied.bookings = BookingTable(self.bookings.items())
        copied.deadlines = DueTimes(self.deadlines.items())
        return copied

    def overlay(self) -> ClusterState:
        """As `fork`, at no cost, while this one does not change."""
        above = object.__new__(ClusterState)
        above.__dict__.update(self.__dict__)
        above.borrowed = set(_ALL)
        return above

    def writable(self, name: str) -> Table[Any]:
        """The table or index of that name, to be written to."""
        found: Table[Any] = self.__dict__[name]
        if name in self.borrowed:
            self.borrowed.discard(name)
            self.__dict__[name] = found = Overlay(found)
        return found

    def absorb(self, above: ClusterState) -> None:
        """Make what was written to `above`, an overlay of this state, this state's own; as applying its changes, but nothing is reckoned anew."""
        for name in _ALL - above.borrowed:  # in any order: they do not depend on each other
            written: Overlay[Any] = above.__dict__[name]
            written.write_to(self.writable(name))

    def keep_alive_s(self, i: Instance, model: Model) -> float:
        """Seconds that an instance stays when it is idle; -1: until evicted."""
        took = i.ready_at - i.planned_at if i.ready_at is not None else 0.0
        return self.keep_alive_rule(model.card.spec.keep_alive, max(0.0, took))

    def model_named(self, name: str) -> Model | None:
        """By name or alias."""
        return self.models.get(name) or self.models.get(self.aliases.get(name, ""))

    def serving_model(self, name: str) -> Model | None:
        """The model whose instances answer requests for `name`, which may be an adapter's, or `base:adapter`."""
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

    def live_instances(self, model: Model) -> list[Instance]:
        """Instances of the model's present generation that run or are about to, and are not asked to leave."""
        generation = model.card.generation
        return [i for i in self.of_model(model.key) if i.leaving == "no" and i.generation == generation and not i.state.parked]

    def suspended_instances(self, model: Model) -> list[Instance]:
        """Suspended instances of the model's present generation, that may come back."""
        generation = model.card.generation
        return [i for i in self.of_model(model.key) if i.state.parked and i.leaving == "no" and i.generation == generation]

    def waiting_count(self, model: str) -> int:
        """Requests and operators that wait for the model."""
        demand = self.demand.get(model)
        waiting = demand.waiting if demand else 0
        if self.waiters:
            waiting += sum(1 for w in self.waiters.values() if w.model == model and w.kind == "wake")
        return waiting

    def last_plan_of(self, model: str) -> PlanRecord | None:
        return self.plans.get(self.last_plan.get(model, ""))

    def inbound_migration(self, instance_id: str) -> Migration | None:
        """The move that needs this instance."""
        return next((m for m in self.migrations.values() if m.destination == instance_id), None) if self.migrations else None

    def is_loader_alive(self, node: str, now: float, within: float) -> bool:
        loader = self.loaders.get(node)
        return loader is not None and now - loader.last_message_at <= within


_MAPPINGS = tuple(f.name for f in fields(ClusterState) if f.name not in ("epoch", "recovered_at", "keep_alive_rule", "borrowed"))
_ALL = frozenset(_MAPPINGS)
