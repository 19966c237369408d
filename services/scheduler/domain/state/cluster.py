"""The cluster as the leader knows it. Owned and mutated by the scheduler's loop only."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.port import Keep
from services.scheduler.domain.state.booking import Booking, device_key
from services.scheduler.domain.state.booking_index import Bookings, Dues
from services.scheduler.domain.state.entities import Instance, Model, Node
from services.scheduler.domain.state.migrations import Move, MoveTimes
from services.scheduler.domain.state.overlay import Overlay
from services.scheduler.domain.state.usage_history import Habit, Prefetch
from services.scheduler.domain.state.volatile import (
    Counter,
    Estimate,
    LoaderPresence,
    MeasuredNeed,
    ModelDemand,
    Objective,
    ParkTrouble,
    Pause,
    Presence,
    Pressure,
    Queueing,
    Seen,
    Trouble,
    Unmet,
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
    seen: Table[Seen] = field(default_factory=dict)
    demand: Table[ModelDemand] = field(default_factory=dict)
    waiters: Table[Waiter] = field(default_factory=dict)
    unmet: Table[Unmet] = field(default_factory=dict)
    pressure: Table[Pressure] = field(default_factory=dict)
    trouble: Table[Trouble] = field(default_factory=dict)
    park_trouble: Table[ParkTrouble] = field(default_factory=dict)
    measured: Table[MeasuredNeed] = field(default_factory=dict)
    pauses: Table[Pause] = field(default_factory=dict)
    estimates: Table[Estimate] = field(default_factory=dict)
    counter: Table[Counter] = field(default_factory=dict)
    habits: Table[Habit] = field(default_factory=dict)
    prefetches: Table[Prefetch] = field(default_factory=dict)
    objectives: Table[Objective] = field(default_factory=dict)
    queueing: Table[Queueing] = field(default_factory=dict)
    moves: Table[Move] = field(default_factory=dict)
    move_times: Table[MoveTimes] = field(default_factory=dict)
    # Indexes. Ids of instances by model, by node and by device (node/device); nodes by what they hold or were measured with.
    aliases: Table[str] = field(default_factory=dict)
    last_plan: Table[str] = field(default_factory=dict)
    kept_up: Table[bool] = field(default_factory=dict)
    to_park: Table[bool] = field(default_factory=dict)
    """Models that are to be parked ahead of their first request and have no instance."""
    apart: Table[bool] = field(default_factory=dict)
    """Models that share no node with some others."""
    by_model: Table[tuple[str, ...]] = field(default_factory=dict)
    by_node: Table[tuple[str, ...]] = field(default_factory=dict)
    by_device: Table[tuple[str, ...]] = field(default_factory=dict)
    resident_on: Table[tuple[str, ...]] = field(default_factory=dict)
    """By revision: nodes whose loaders hold its weights, whole."""
    kept_on: Table[tuple[str, ...]] = field(default_factory=dict)
    """By revision: nodes whose loaders have its files on disk."""
    bringing: Table[tuple[str, ...]] = field(default_factory=dict)
    """By node: instances whose weights are to be brought there."""
    queues: Table[float] = field(default_factory=dict)
    """By node: when what its links have to bring will have come. Nodes with idle links are left out."""
    measured_on: Table[tuple[str, ...]] = field(default_factory=dict)
    """By model: nodes with an estimate of their own."""
    bookings: Table[Booking] = field(default_factory=Bookings)
    dues: Table[float] = field(default_factory=Dues)
    """By instance: from when on the mere passing of time may change something for it; those without one are left alone by the timer."""
    claimed: Table[tuple[str, str]] = field(default_factory=dict)
    """Devices that instances wait for, as (node, device)."""
    keep: Keep = field(default=thaw.keep, compare=False, repr=False)
    """How long idle instances stay: the profile's. Whoever makes a state for another profile says so (`keeping`)."""
    borrowed: set[str] = field(default_factory=set, compare=False, repr=False)
    """Of an overlay: the tables that nothing was written to, which are still those of the state below."""

    def fork(self) -> ClusterState:
        """A copy that can be changed without changing this one (entities are frozen and shared)."""
        tables: dict[str, Any] = {name: dict(self.__dict__[name]) for name in _MAPPINGS}
        copied = ClusterState(self.epoch, self.recovered_at, **tables, keep=self.keep)
        copied.bookings = Bookings(self.bookings.items())
        copied.dues = Dues(self.dues.items())
        return copied

    def overlay(self) -> ClusterState:
        """As `fork`, at no cost, while this one does not change."""
        above = object.__new__(ClusterState)
        above.__dict__.update(self.__dict__)
        above.borrowed = set(_ALL)
        return above

    def own(self, name: str) -> Table[Any]:
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
            written.pour(self.own(name))

    def kept_for(self, i: Instance, model: Model) -> float:
        """Seconds that an instance stays when it is idle; -1: until evicted."""
        took = i.ready_at - i.planned_at if i.ready_at is not None else 0.0
        return self.keep(model.card.spec.keep_alive, max(0.0, took))

    def model_named(self, name: str) -> Model | None:
        """By name or alias."""
        return self.models.get(name) or self.models.get(self.aliases.get(name, ""))

    def serving(self, name: str) -> Model | None:
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

    def live(self, model: Model) -> list[Instance]:
        """Instances of the model's present generation that run or are about to, and are not asked to leave."""
        generation = model.card.generation
        return [i for i in self.of_model(model.key) if i.leaving == "no" and i.generation == generation and not i.state.parked]

    def parked(self, model: Model) -> list[Instance]:
        """Suspended instances of the model's present generation, that may come back."""
        generation = model.card.generation
        return [i for i in self.of_model(model.key) if i.state.parked and i.leaving == "no" and i.generation == generation]

    def waiting(self, model: str) -> int:
        """Requests and operators that wait for the model."""
        demand = self.demand.get(model)
        waiting = demand.waiting if demand else 0
        if self.waiters:
            waiting += sum(1 for w in self.waiters.values() if w.model == model and w.kind == "wake")
        return waiting

    def last_plan_of(self, model: str) -> PlanRecord | None:
        return self.plans.get(self.last_plan.get(model, ""))

    def move_to(self, instance_id: str) -> Move | None:
        """The move that needs this instance."""
        return next((m for m in self.moves.values() if m.destination == instance_id), None) if self.moves else None

    def loader_alive(self, node: str, now: float, within: float) -> bool:
        loader = self.loaders.get(node)
        return loader is not None and now - loader.heard_at <= within


_MAPPINGS = tuple(f.name for f in fields(ClusterState) if f.name not in ("epoch", "recovered_at", "keep", "borrowed"))
_ALL = frozenset(_MAPPINGS)
