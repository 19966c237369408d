"""Payers of device time that is charged to no request.

Engines have meters of it, by the plan that made the work necessary. The ledger has each meter's
last reading, and records the difference in one transaction with the new one. So a reading counts
once, whichever leader records it, and however often (docs/adr/0097).

The requests that waited for the plan share the time, as they share what it cleared (ADR 0091).
Without a plan, or a request that waited for it, the owner of the model pays.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, exists, func, literal, select, union_all
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.scheduler.adapters import tables
from services.scheduler.adapters.device_accounts import add_charged
from services.scheduler.adapters.usage_dimensions import group_dimensions, inside, select_dimensions
from services.scheduler.domain.background_work import CHARGED, BackgroundReading
from services.scheduler.domain.device_accounts import AccountName
from shared.contracts.usage import ViewUsage

_DIMENSIONS = ("hour", "key", "model", "adapter")
_ROW = ("hour", "key", "model", "plan_id", "device_kind")


async def record_background(
    connection: AsyncConnection,
    readings: Iterable[BackgroundReading],
    hour: int,
    owner: Callable[[str], str],
    older: Container[str],
) -> None:
    """Record what engines have worked since their last readings.

    Args:
        connection: A transaction that is guarded by the leader's epoch.
        readings: At most one of each engine and plan.
        hour: The present hour, in which the work is recorded.
        owner: Returns the key that pays for a model's work without a request.
        older: Engines that are older than the accounts: their first readings are not added to
            them.
    """
    news = {(r.engine, r.plan_id): r for r in readings}
    known = await _read_known(connection, {engine for engine, _ in news})
    models = await _read_models(connection, {plan_id for _, plan_id in news if plan_id not in ("", CHARGED)})
    amounts: dict[tuple[int, str, str, str, str], int] = {}
    charged: dict[AccountName, int] = {}
    for name, r in news.items():
        if r.plan_id == CHARGED:
            more = r.us - known.get(name, r.us if r.engine in older else 0)
            charged[r.model, r.device_kind] = charged.get((r.model, r.device_kind), 0) + more
            continue
        if (more := r.us - known.get(name, 0)) > 0:
            row = (hour, owner(models.get(r.plan_id, r.model)), r.model, r.plan_id, r.device_kind)
            amounts[row] = amounts.get(row, 0) + more
    await add_charged(connection, charged, hour)
    if amounts:
        table = tables.background_work
        statement = insert(table)
        added = {"us": table.c.us + statement.excluded.us}
        await connection.execute(
            statement.on_conflict_do_update(index_elements=list(_ROW), set_=added),
            [dict(zip(_ROW, row, strict=True), us=us) for row, us in amounts.items()],
        )
    if news:
        reading = insert(tables.background_readings)
        latest = {"us": reading.excluded.us, "hour": reading.excluded.hour}
        await connection.execute(
            reading.on_conflict_do_update(index_elements=["engine", "plan_id"], set_=latest),
            [{"engine": engine, "plan_id": plan_id, "us": r.us, "hour": hour} for (engine, plan_id), r in news.items()],
        )


async def _read_known(connection: AsyncConnection, engines: set[str]) -> dict[tuple[str, str], int]:
    table = tables.background_readings
    rows = await connection.execute(select(table.c.engine, table.c.plan_id, table.c.us).where(table.c.engine.in_(engines)))
    return {(engine, plan_id): int(us) for engine, plan_id, us in rows}


async def _read_models(connection: AsyncConnection, plan_ids: set[str]) -> dict[str, str]:
    plans = tables.plans
    rows = await connection.execute(select(plans.c.plan_id, plans.c.model).where(plans.c.plan_id.in_(plan_ids)))
    return {str(plan_id): str(model) for plan_id, model in rows}


def select_background(query: ViewUsage, dimensions: tuple[str, ...]) -> Select[Any]:
    """Sum up the microseconds (`us`) by the dimensions and the kind of the device."""
    charges = union_all(_charge_waiters(query), _charge_owners(query)).subquery()
    kind, us = charges.c.device_kind, func.sum(charges.c.us).label("us")
    return select(*select_dimensions(charges, dimensions), kind, us).group_by(*group_dimensions(charges, dimensions), kind)


def _charge_waiters(query: ViewUsage) -> Select[Any]:
    """Split work among all requests that waited for its plan, whenever they ended."""
    waits, rows = tables.cold_waits, tables.background_work
    asked = rows.c.plan_id.in_(select(waits.c.plan_id).where(*inside(query, waits))) & (rows.c.plan_id != "")
    by_plan = select(rows.c.plan_id, rows.c.device_kind, func.sum(rows.c.us).label("us")).where(asked)
    worked = by_plan.group_by(rows.c.plan_id, rows.c.device_kind).subquery()
    counted = select(waits.c.plan_id, func.sum(waits.c.requests).label("all"))
    everyone = counted.where(waits.c.plan_id.in_(select(worked.c.plan_id))).group_by(waits.c.plan_id).subquery()
    share = worked.c.us * waits.c.requests / everyone.c.all
    statement = select(*_dimensions(waits), worked.c.device_kind, (share * 1.0).label("us"))
    joined = statement.join(worked, worked.c.plan_id == waits.c.plan_id).join(everyone, everyone.c.plan_id == waits.c.plan_id)
    return joined.where(*inside(query, waits))


def _charge_owners(query: ViewUsage) -> Select[Any]:
    waits, rows = tables.cold_waits, tables.background_work
    has_waits = exists().where(waits.c.plan_id == rows.c.plan_id)
    statement = select(*_dimensions(rows), rows.c.device_kind, (rows.c.us * 1.0).label("us"))
    return statement.where(*inside(query, rows), ~has_waits)


def _dimensions(table: Table) -> list[ColumnElement[Any]]:
    return [table.c[name].label(name) if name in table.c else literal("").label(name) for name in _DIMENSIONS]
