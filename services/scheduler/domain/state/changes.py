"""Changes of the cluster's state, and how they are applied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.scheduler.domain.state.cluster import ClusterState, Table
from services.scheduler.domain.state.entities import Entity, Instance, Model, Node, key_of
from services.scheduler.domain.state.full_workers import FullWorker
from services.scheduler.domain.state.indexes import index
from services.scheduler.domain.state.measurements import Estimate, MeasuredMemory, SloCounts
from services.scheduler.domain.state.migrations import Migration, MigrationTimes
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
from services.scheduler.domain.values import replace, value
from shared.contracts.plans import PlanRecord


@value(frozen=True, slots=True)
class Put:
    """Insert or replace an entity."""

    entity: Entity


@value(frozen=True, slots=True)
class Drop:
    """Remove the entity of that kind and key."""

    kind: type[Entity]
    key: str


@value(frozen=True, slots=True)
class Traced:
    """Store the root span of a plan's load."""

    plan_id: str
    instance_id: str
    traceparent: str


Change = Put | Drop | Traced


_TABLES: dict[type[Any], str] = {
    Model: "models",
    Node: "nodes",
    Instance: "instances",
    PlanRecord: "plans",
    Presence: "presence",
    LoaderPresence: "loaders",
    InstanceReport: "reports",
    LaterStage: "later_stages",
    FullWorker: "full_workers",
    Fetch: "fetches",
    Delivery: "deliveries",
    ModelDemand: "demand",
    Waiter: "waiters",
    Unschedulable: "unschedulable",
    Overload: "overload",
    KeyShare: "key_shares",
    ModelUsers: "model_users",
    ShareClock: "share_clock",
    FailureHistory: "failures",
    ParkFailures: "park_failures",
    ConsolidationFailures: "consolidation_failures",
    MeasuredMemory: "measured",
    Cooldown: "cooldowns",
    Estimate: "estimates",
    Counter: "counter",
    UsageHistory: "usage_history",
    Prefetch: "prefetches",
    Pull: "pulls",
    ExpectationSent: "expectations",
    SloCounts: "slo_counts",
    SloQueue: "slo_queue",
    Migration: "migrations",
    MigrationTimes: "migration_times",
}
KINDS: tuple[type[Any], ...] = tuple(_TABLES)


def table(state: ClusterState, kind: type[Entity]) -> Table[Any]:
    """Return the table of a kind, for reading; `apply` and `put` write."""
    found: Table[Any] = getattr(state, _TABLES[kind])
    return found


def apply(state: ClusterState, changes: Iterable[Change]) -> None:
    """Apply `changes` to `state`, in order."""
    for change in changes:
        match change:
            case Put(entity):
                put(state, entity)
            case Drop(kind, key):
                if (old := table(state, kind).get(key)) is not None:
                    index(state, state.get_writable(_TABLES[kind]).pop(key), None)
                    if isinstance(old, Instance) and (plan := state.plans.get(old.plan_id)) is not None:
                        _put_plan(state, plan)
                    elif isinstance(old, Model):
                        _forget_last_plan(state, old.key)
            case Traced(plan_id, instance_id, traceparent):
                if (plan := state.plans.get(plan_id)) is not None:
                    state.get_writable("plans")[plan_id] = plan.model_copy(update={"traceparent": traceparent})
                if (instance := state.instances.get(instance_id)) is not None:
                    state.get_writable("instances")[instance_id] = replace(instance, traceparent=traceparent)


def put(state: ClusterState, entity: Entity) -> bool:
    """Insert or replace an entity; return False if it is unchanged."""
    kind, key = type(entity), key_of(entity)
    old = state.__dict__[_TABLES[kind]].get(key)
    if old is not None and old == entity:
        return False
    if isinstance(entity, PlanRecord):
        _put_plan(state, entity)
    else:
        state.get_writable(_TABLES[kind])[key] = entity
        index(state, old, entity)
    return True


def _is_needed(state: ClusterState, plan: PlanRecord) -> bool:
    """True if a plan is pending, or has promises that a new leader restores."""
    if plan.outcome == "pending":
        return True
    chosen, group = plan.chosen, state.instances.get(plan.instance_id or "")
    has_full_workers = chosen is not None and bool(chosen.later_devices) and chosen.full_workers > 0
    return has_full_workers and group is not None and group.plan_id == plan.plan_id


def _forget_last_plan(state: ClusterState, model: str) -> None:
    """Keep the last plan of a removed model only as long as it is needed."""
    key = state.last_plan.get(model)
    if key is None:
        return
    del state.get_writable("last_plan")[model]
    if (plan := state.plans.get(key)) is not None and not _is_needed(state, plan):
        del state.get_writable("plans")[key]


def _put_plan(state: ClusterState, plan: PlanRecord) -> None:
    """Keep the last plan of each model, all pending ones, and those that promise memory.

    The database has the others.
    """
    key = plan.plan_id
    last = state.last_plan.get(plan.model)
    if key not in state.plans and last != key:
        if last is not None and (old := state.plans.get(last)) is not None and not _is_needed(state, old):
            del state.get_writable("plans")[last]
        state.get_writable("last_plan")[plan.model] = last = key
    if last == key or _is_needed(state, plan):
        state.get_writable("plans")[key] = plan
    else:
        state.get_writable("plans").pop(key, None)
