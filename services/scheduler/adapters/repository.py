"""The durable part of the cluster's state.

Every write is fenced by the leader's epoch in its own transaction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace
from functools import cache
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlalchemy import Delete, Select, Table, bindparam, delete, or_, select, update
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.scheduler.adapters import tables
from services.scheduler.adapters.gc_tuning import growing_heap
from services.scheduler.adapters.statistics import (
    delete_estimates,
    forget_unknown,
    read_estimates,
    read_loaders,
    write_estimates,
    write_loaders,
)
from services.scheduler.domain.state.changes import Change, Drop, Put, Traced, apply
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Device, Entity, Instance, Model, Node, key_of
from services.scheduler.domain.state.measurements import (
    AppliedReport,
    Estimate,
    HourCounts,
    MeasuredMemory,
    MemoryProfile,
    SloCounts,
)
from services.scheduler.domain.state.pulls import Pull
from services.scheduler.domain.state.volatile import LoaderPresence
from shared.contracts.admin import ModelPulled
from shared.contracts.base import ErrorBody
from shared.contracts.models import ModelCard, routes_of
from shared.contracts.node import InstanceState
from shared.contracts.plans import PlanRecord
from shared.contracts.traces import TRACE_MAX_AGE_S, TRACE_MAX_COUNT
from shared.messaging.replies import faults_of

log = logging.getLogger(__name__)
E = TypeVar("E", bound=Entity)
_KEYS: dict[type[Any], tuple[Table, str]] = {
    Model: (tables.models, "name"),
    Node: (tables.nodes, "name"),
    Instance: (tables.instances, "instance_id"),
    PlanRecord: (tables.plans, "plan_id"),
    Estimate: (tables.parameters, ""),
    MeasuredMemory: (tables.profiles, "model"),
    SloCounts: (tables.objectives, "model"),
    Pull: (tables.pulls, "key"),
}
_REMEMBERED_PLANS = 1000
"""Plans in memory for `thaw explain` without a database call."""
_LOGGED_KEYS = 10
"""Keys of unreadable rows in one log record."""
PRUNE_BATCH = 1000
"""Plans deleted in one transaction."""
_PLAN_FIELDS = tuple(PlanRecord.model_fields)
_TRACE_PLAN = update(tables.plans).where(tables.plans.c.plan_id == bindparam("key")).values(traceparent=bindparam("parent"))
_TRACE_INSTANCE = (
    update(tables.instances).where(tables.instances.c.instance_id == bindparam("key")).values(traceparent=bindparam("parent"))
)
_EPOCH_GUARD = select(tables.leadership.c.epoch).where(tables.leadership.c.epoch == bindparam("wanted")).with_for_update(read=True)


class StaleEpoch(Exception):
    """Another leader has been elected: nothing was written."""


class Repository:
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def commit(self, epoch: int, changes: Iterable[Change]) -> None:
        """Write the durable ones of `changes` in one transaction.

        Raises:
            StaleEpoch: `epoch` is not the present one.
        """
        puts, drops, traced = _net(changes)
        if not (puts or drops or traced):
            return
        async with self._engine.begin() as connection:
            await require_epoch(connection, epoch)
            for kind, keys in drops.items():
                await _delete(connection, kind, keys)
            for kind, entities in puts.items():
                await _upsert(connection, kind, entities)
            if traced:
                await connection.execute(_TRACE_PLAN, [{"key": c.plan_id, "parent": c.traceparent} for c in traced])
                await connection.execute(_TRACE_INSTANCE, [{"key": c.instance_id, "parent": c.traceparent} for c in traced])

    async def load(self, epoch: int, now: float) -> ClusterState:
        """Return the state as the last leader left it, for a term that begins at `now`.

        Rows that this version cannot read, as those of a newer one, are left out and logged.
        """
        state = ClusterState(epoch=epoch, recovered_at=now)
        with growing_heap():
            async with self._engine.connect() as connection:
                devices = await _devices(connection)
                found: list[Entity] = [*await _read(connection, select(tables.models), _model)]
                found += await _read(connection, select(tables.instances), lambda row: _instance(row, now))
                # after their instances, so that each device is computed once
                found += await _read(connection, select(tables.nodes), lambda row: _node(row, devices.get(row["name"], []), now))
                found += await _read(connection, select(tables.profiles), _profile)
                found += await _read(connection, select(tables.objectives), _slo_counts)
                found += await _read(connection, select(tables.pulls), lambda row: _pull(row, now))
                newest = select(tables.plans).order_by(tables.plans.c.created.desc()).limit(_REMEMBERED_PLANS)
                plans = (await _read(connection, newest, _plan))[::-1]
                found += [*await read_estimates(connection), *await read_loaders(connection, now)]
            apply(state, [Put(e) for e in (*found, *plans)])
        return state

    async def keep_loaders(self, epoch: int, loaders: Iterable[LoaderPresence]) -> None:
        """Replace the stored status of these loaders' nodes.

        Raises:
            StaleEpoch: `epoch` is not the present one.
        """
        async with self._engine.begin() as connection:
            await require_epoch(connection, epoch)
            await write_loaders(connection, loaders)

    async def plan(self, plan_id: str) -> PlanRecord | None:
        return await self._one_plan(select(tables.plans).where(tables.plans.c.plan_id == plan_id))

    async def last_plan(self, model: str) -> PlanRecord | None:
        newest = select(tables.plans).where(tables.plans.c.model == model).order_by(tables.plans.c.created.desc()).limit(1)
        return await self._one_plan(newest)

    async def plan_of_instance(self, instance_id: str) -> PlanRecord | None:
        """Return the last plan that started or resumed the instance."""
        plans = tables.plans.c
        return await self._one_plan(
            select(tables.plans).where(plans.instance_id == instance_id).order_by(plans.created.desc()).limit(1)
        )

    async def _one_plan(self, query: Any) -> PlanRecord | None:
        async with self._engine.connect() as connection:
            found = await _read(connection, query.limit(1), _plan)
        return found[0] if found else None

    async def prune(self, epoch: int, now: float) -> int:
        """Delete plans over seven days old or beyond the newest ten thousand, except pending ones.

        Deletes PRUNE_BATCH rows in each transaction, so that decisions do not wait long.

        Returns:
            The number of deleted plans.

        Raises:
            StaleEpoch: `epoch` is not the present one.
        """
        async with self._engine.begin() as connection:
            await require_epoch(connection, epoch)
            await forget_unknown(connection)
        plans = tables.plans.c
        newest_first = select(plans.plan_id).order_by(plans.created.desc(), plans.plan_id.desc())
        old = or_(plans.created < now - TRACE_MAX_AGE_S, plans.plan_id.in_(newest_first.offset(TRACE_MAX_COUNT)))
        batch = select(plans.plan_id).where(old, plans.outcome != "pending").limit(PRUNE_BATCH)
        pruned = 0
        while True:
            async with self._engine.begin() as connection:
                await require_epoch(connection, epoch)
                gone = int((await connection.execute(delete(tables.plans).where(plans.plan_id.in_(batch)))).rowcount)
            pruned += gone
            if gone < PRUNE_BATCH:
                return pruned


async def require_epoch(connection: AsyncConnection, epoch: int) -> None:
    """Keep other leaders from starting before this transaction has ended."""
    if (await connection.execute(_EPOCH_GUARD, {"wanted": epoch})).first() is None:
        raise StaleEpoch(f"epoch {epoch} is over")


async def _read(connection: AsyncConnection, query: Select[Any], parse: Callable[[dict[str, Any]], E]) -> list[E]:
    """Return the rows of one table, without those that `parse` fails for.

    Such a row stays in the table. One of them must not end every term of every scheduler.
    """
    found: list[E] = []
    unreadable: list[str] = []
    error = ""
    for row in (await connection.execute(query)).mappings():
        try:
            found.append(parse(dict(row)))
        except (ValueError, TypeError, LookupError, AttributeError) as e:
            unreadable.append(str(next(iter(row.values()))))
            error = faults_of(e) if isinstance(e, ValidationError) else repr(e)
    if unreadable:
        (table,) = query.get_final_froms()
        fields = {"table": str(table), "rows": len(unreadable), "keys": unreadable[:_LOGGED_KEYS], "error": error}
        log.error("failed to read stored rows; they are ignored until they are written again", extra=fields)
    return found


def is_durable(changes: Iterable[Change]) -> bool:
    return any(isinstance(c, Traced) or (c.kind if isinstance(c, Drop) else type(c.entity)) in _KEYS for c in changes)


def _net(
    changes: Iterable[Change],
) -> tuple[dict[type[Any], dict[str, Entity]], dict[type[Any], list[str]], list[Traced]]:
    """Return the last write of every entity, the deletions, and the traces without such a write."""
    last: dict[tuple[type[Any], str], Entity | None] = {}
    traced = []
    for change in changes:
        match change:
            case Put(entity) if type(entity) in _KEYS:
                last[type(entity), key_of(entity)] = entity
            case Drop(kind, key) if kind in _KEYS:
                last[kind, key] = None
            case Traced() if not _trace(last, change):
                traced.append(change)
    puts: dict[type[Any], dict[str, Entity]] = {}
    for (kind, key), final in last.items():
        if final is not None:
            puts.setdefault(kind, {})[key] = final
    drops: dict[type[Any], list[str]] = {}
    for (kind, key), final in last.items():
        if final is None:
            drops.setdefault(kind, []).append(key)
    return puts, drops, traced


def _trace(last: dict[tuple[type[Any], str], Entity | None], change: Traced) -> bool:
    """Add the trace to rows that are written anyway; return True if both are."""
    plan, instance = last.get((PlanRecord, change.plan_id)), last.get((Instance, change.instance_id))
    if not isinstance(plan, PlanRecord) or not isinstance(instance, Instance):
        return False
    last[PlanRecord, change.plan_id] = plan.model_copy(update={"traceparent": change.traceparent})
    last[Instance, change.instance_id] = replace(instance, traceparent=change.traceparent)
    return True


async def _delete(connection: AsyncConnection, kind: type[Any], keys: list[str]) -> None:
    if kind is Estimate:
        await delete_estimates(connection, keys)
        return
    await connection.execute(_deletion(*_KEYS[kind]), {"keys": keys})
    if kind is Node:
        await connection.execute(_deletion(tables.devices, "node"), {"keys": keys})


@cache
def _deletion(table: Table, column: str) -> Delete:
    return delete(table).where(table.c[column].in_(bindparam("keys", expanding=True)))


async def _upsert(connection: AsyncConnection, kind: type[Any], entities: dict[str, Entity]) -> None:
    if kind is Estimate:
        await write_estimates(connection, (e for e in entities.values() if isinstance(e, Estimate)))
        return
    # One statement for any number of rows, prepared once: with the rows in its text it would be
    # compiled for every number of them, up to PostgreSQL's limit of 32,767 parameters.
    rows = [_row(e) for e in entities.values()]
    await connection.execute(_upsertion(*_KEYS[kind]), rows)
    if kind is Node:
        await connection.execute(_deletion(tables.devices, "node"), {"keys": list(entities)})
        nodes = [e for e in entities.values() if isinstance(e, Node)]
        if lines := [{"node": n.name, **asdict(d)} for n in nodes for d in n.devices]:
            await connection.execute(insert(tables.devices), lines)


@cache
def _upsertion(table: Table, column: str) -> Insert:
    """Return the statement that inserts or replaces rows.

    Made once, as SQLAlchemy takes longer to make it than to execute it.
    """
    statement = insert(table)
    others = {c.name: statement.excluded[c.name] for c in table.columns if c.name != column}
    return statement.on_conflict_do_update(index_elements=[column], set_=others)


def _row(entity: Entity) -> dict[str, Any]:
    match entity:
        case Model():
            return {
                "name": entity.key,
                "card": entity.card,
                "error": entity.error,
                "resting": entity.sleep_requested,
            }
        case Node():
            return {k: v for k, v in _fields(entity).items() if k != "devices"}
        case MeasuredMemory():
            return {**_fields(entity), "by_kind": {k: p.model_dump() for k, p in entity.by_kind.items()}}
        case SloCounts():
            return {
                "model": entity.model,
                "hours": [[h.hour, h.total, h.met] for h in entity.hours],
                "applied": [[a.gateway, a.number, a.at] for a in entity.applied],
            }
        case Pull():
            answer = entity.answer.model_dump(mode="json") if entity.answer is not None else None
            return {**_fields(entity), "key": entity.key, "requests": list(entity.requests), "answer": answer}
        case Instance():
            return {**_fields(entity), "device_ids": list(entity.device_ids), "state": entity.state.value}
        case PlanRecord():
            return {name: getattr(entity, name) for name in _PLAN_FIELDS} | {
                "predicted": entity.chosen.predicted if entity.chosen else {},
                "predicted_ms": entity.chosen.predicted_ms if entity.chosen else None,
                "error_ms": entity.chosen.error_ms if entity.chosen else None,
            }
    raise TypeError(f"{type(entity).__name__} is not a durable entity")


def _fields(entity: Node | Instance | MeasuredMemory | Pull) -> dict[str, Any]:
    """Return the fields without copying: the values are frozen, or become JSON at once."""
    return {f.name: getattr(entity, f.name) for f in fields(entity)}


def _model(row: dict[str, Any]) -> Model:
    return Model(_card(row["card"]), row["error"], row["resting"])


def _profile(row: dict[str, Any]) -> MeasuredMemory:
    return MeasuredMemory(**{**row, "by_kind": {k: MemoryProfile.model_validate(p) for k, p in row["by_kind"].items()}})


def _slo_counts(row: dict[str, Any]) -> SloCounts:
    hours, applied = (HourCounts(*h) for h in row["hours"]), (AppliedReport(*a) for a in row["applied"])
    return SloCounts(row["model"], tuple(hours), tuple(applied))


def _pull(row: dict[str, Any], now: float) -> Pull:
    """Clip times of another host's clock to now."""
    del row["key"]
    times = {t: min(row[t], now) for t in ("since", "sent_at", "ended_at") if row[t] is not None}
    answer = row["answer"]
    if answer is not None:
        answer = (ModelPulled if answer.get("kind") == "pulled" else ErrorBody).model_validate(answer)
    return Pull(**{**row, **times, "requests": tuple(row["requests"]), "answer": answer})


async def _devices(connection: AsyncConnection) -> dict[str, list[Device]]:
    found: dict[str, list[Device]] = {}
    for row in (await connection.execute(select(tables.devices).order_by(tables.devices.c.device_id))).mappings():
        columns = dict(row)
        found.setdefault(columns.pop("node"), []).append(Device(**columns))
    return found


def _node(row: dict[str, Any], devices: list[Device], now: float) -> Node:
    """Clip times of another host's clock to now: a drain would last longer."""
    since = row["drain_since"]
    return Node(**{**row, "devices": tuple(devices), "drain_since": min(since, now) if since is not None else None})


def _instance(row: dict[str, Any], now: float) -> Instance:
    """Clip times of another host's clock to now."""
    times = {t: min(row[t], now) for t in ("requested_at", "planned_at", "stop_at", "sent_at", "ready_at") if row[t] is not None}
    return Instance(**{**row, **times, "device_ids": tuple(row["device_ids"]), "state": InstanceState(row["state"])})


def _card(row: Any) -> ModelCard:
    """Return the card with the routes that its engine declares in this version."""
    card = ModelCard.model_validate(row)
    routes = routes_of(card.spec)
    return card if card.routes == routes else card.model_copy(update={"routes": routes})


def _plan(row: dict[str, Any]) -> PlanRecord:
    return PlanRecord.model_validate(row)
