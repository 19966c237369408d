"""The cluster as the leader knows it, and how changes are applied to it. Owned and mutated by the scheduler's loop only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from services.scheduler.domain.entities import (
    Counter,
    Entity,
    Estimate,
    Instance,
    LoaderPresence,
    Model,
    ModelDemand,
    Node,
    Pause,
    Presence,
    Pressure,
    Seen,
    Trouble,
    Unmet,
    Waiter,
    key_of,
)
from shared.contracts.plans import PlanRecord


@dataclass(frozen=True, slots=True)
class Put:
    """Insert or replace an entity."""

    entity: Entity


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the entity of that kind and key."""

    kind: type[Entity]
    key: str


@dataclass(frozen=True, slots=True)
class Traced:
    """The plan's load has this root span."""

    plan_id: str
    instance_id: str
    traceparent: str


Change = Put | Drop | Traced


@dataclass
class ClusterState:
    """Tables of frozen entities by key, and a few indexes that `apply` keeps."""

    epoch: int
    recovered_at: float = 0.0
    models: dict[str, Model] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)
    plans: dict[str, PlanRecord] = field(default_factory=dict)
    presence: dict[str, Presence] = field(default_factory=dict)
    loaders: dict[str, LoaderPresence] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)
    demand: dict[str, ModelDemand] = field(default_factory=dict)
    waiters: dict[str, Waiter] = field(default_factory=dict)
    unmet: dict[str, Unmet] = field(default_factory=dict)
    pressure: dict[str, Pressure] = field(default_factory=dict)
    trouble: dict[str, Trouble] = field(default_factory=dict)
    pauses: dict[str, Pause] = field(default_factory=dict)
    estimates: dict[str, Estimate] = field(default_factory=dict)
    counter: dict[str, Counter] = field(default_factory=dict)
    # Indexes.
    aliases: dict[str, str] = field(default_factory=dict)
    last_plan: dict[str, str] = field(default_factory=dict)
    kept_up: dict[str, None] = field(default_factory=dict)

    def fork(self) -> ClusterState:
        """A state that can be changed without changing this one (entities are frozen and shared)."""
        copy = replace(self)
        for name in _DICTS:
            setattr(copy, name, dict(getattr(self, name)))
        return copy

    def model_named(self, name: str) -> Model | None:
        """By name or alias."""
        return self.models.get(name) or self.models.get(self.aliases.get(name, ""))

    def of_model(self, name: str) -> Iterator[Instance]:
        return (i for i in self.instances.values() if i.model == name)

    def on_node(self, node: str) -> Iterator[Instance]:
        return (i for i in self.instances.values() if i.node == node)

    def live(self, model: Model) -> list[Instance]:
        """Instances of the model's present generation that run or are about to, and are not asked to leave."""
        return [i for i in self.of_model(model.key) if i.leaving == "no" and i.generation == model.card.generation]

    def waiting(self, model: str) -> int:
        """Requests and operators that wait for the model."""
        demand = self.demand.get(model)
        wakes = sum(1 for w in self.waiters.values() if w.model == model and w.kind == "wake")
        return (demand.waiting if demand else 0) + wakes

    def last_plan_of(self, model: str) -> PlanRecord | None:
        return self.plans.get(self.last_plan.get(model, ""))

    def loader_alive(self, node: str, now: float, within: float) -> bool:
        loader = self.loaders.get(node)
        return loader is not None and now - loader.heard_at <= within


_DICTS = tuple(f.name for f in fields(ClusterState) if f.name not in ("epoch", "recovered_at"))

_TABLES: dict[type[Any], str] = {
    Model: "models",
    Node: "nodes",
    Instance: "instances",
    PlanRecord: "plans",
    Presence: "presence",
    LoaderPresence: "loaders",
    Seen: "seen",
    ModelDemand: "demand",
    Waiter: "waiters",
    Unmet: "unmet",
    Pressure: "pressure",
    Trouble: "trouble",
    Pause: "pauses",
    Estimate: "estimates",
    Counter: "counter",
}


def table(state: ClusterState, kind: type[Entity]) -> dict[str, Any]:
    found: dict[str, Any] = getattr(state, _TABLES[kind])
    return found


def apply(state: ClusterState, changes: Iterable[Change]) -> None:
    """Carry out `changes` on `state`, in order."""
    for change in changes:
        match change:
            case Put(entity):
                _put(state, entity)
            case Drop(kind, key):
                _drop(state, kind, key)
            case Traced(plan_id, instance_id, traceparent):
                if plan_id in state.plans:
                    state.plans[plan_id] = state.plans[plan_id].model_copy(update={"traceparent": traceparent})
                if instance_id in state.instances:
                    state.instances[instance_id] = replace(state.instances[instance_id], traceparent=traceparent)


def _put(state: ClusterState, entity: Entity) -> None:
    key = key_of(entity)
    if isinstance(entity, Model):
        _unindex(state, state.models.get(key))
        state.aliases.update(dict.fromkeys(entity.card.spec.aliases, key))
        if entity.card.spec.replicas.min > 0:
            state.kept_up[key] = None
    elif isinstance(entity, PlanRecord):
        superseded = state.last_plan.get(entity.model)
        if superseded not in (None, key) and (old := state.plans.get(superseded)) and old.outcome != "pending":
            del state.plans[superseded]
        if superseded != key and (key not in state.plans):
            state.last_plan[entity.model] = key
    table(state, type(entity))[key] = entity
    if isinstance(entity, PlanRecord) and entity.outcome != "pending" and state.last_plan.get(entity.model) != key:
        del state.plans[key]


def _drop(state: ClusterState, kind: type[Entity], key: str) -> None:
    if kind is Model:
        _unindex(state, state.models.get(key))
    table(state, kind).pop(key, None)


def _unindex(state: ClusterState, model: Model | None) -> None:
    if model is not None:
        for alias in model.card.spec.aliases:
            state.aliases.pop(alias, None)
        state.kept_up.pop(model.key, None)
