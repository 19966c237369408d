"""Payers of starts: shares of their seconds, and of the memory that they took from others.

The requests that waited for a start share it equally. They also share the time that it took to
clear its memory, and the restarts of models that it preempted, which their own requests do not pay
for (docs/adr/0091). Charges depend on plans and waits only, which are recorded once each: a sum
over keys is the sum over plans, in whatever order they were recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Select, Subquery, Table, exists, func, literal, select, union_all
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.scheduler.adapters import tables
from services.scheduler.adapters.usage_dimensions import group_dimensions, inside, select_dimensions
from shared.contracts.usage import ViewUsage

MIGRATES = "migrate"
"""Trigger of starts of destinations. They have no requests of their own."""
_DIMENSIONS = ("hour", "key", "model", "adapter")


async def record_displacements(connection: AsyncConnection, since: float, owner: Callable[[str], str]) -> None:
    """Record what the starts since `since` (Unix seconds) took from others, each once.

    Args:
        connection: A transaction that is guarded by the leader's epoch.
        since: Time of the oldest plan.
        owner: Returns the key that pays for a model's starts without a request.
    """
    plans, causes = tables.plans, tables.plans.alias("causes")
    cleared = plans.c.chosen["cleared_ms"].as_float()
    asked = (
        select(
            *(plans.c[n] for n in ("plan_id", "model", "created", "trigger", "outcome", "chosen", "measured_ms", "caused_by")),
            causes.c.model.label("cause_model"),
        )
        .outerjoin(causes, causes.c.plan_id == plans.c.caused_by)
        .where(plans.c.created >= since, plans.c.outcome != "pending")
        .where(cleared.is_not(None) | causes.c.plan_id.is_not(None))
    )
    found = (await connection.execute(asked)).mappings()
    if rows := [row for plan in found for row in list_displacements(plan, owner)]:
        await connection.execute(insert(tables.displacements).on_conflict_do_nothing(index_elements=["plan_id", "payer"]), rows)


def list_displacements(plan: RowMapping | dict[str, Any], owner: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return the rows of a plan that has ended: its clearing, and itself if it is a restart.

    A restart is paid by its cause. What it clears for itself is paid by its own requests, so that
    two models which preempt each other pay in turns; only a destination's cause pays for both.
    """
    chosen = plan["chosen"] or {}
    devices: list[str] = [*(chosen.get("device_ids") or [""]), *(chosen.get("later_devices") or ())]
    common = {
        "plan_id": plan["plan_id"],
        "hour": int(plan["created"] // 3600),
        "device_kind": devices[0].partition(":")[0],
        "devices": len(devices),
    }
    has_cause = plan["cause_model"] is not None
    own = {**common, "payer": plan["plan_id"], "key": owner(plan["model"]), "model": plan["model"]}
    cause = {**common, "payer": plan["caused_by"], "model": plan["cause_model"]}
    cause["key"] = owner(plan["cause_model"]) if has_cause else ""
    clearing = {"victims": 0, "clearing_s": 0.0}
    if chosen.get("cleared_ms") is not None:
        clearing = {"victims": len(chosen["victims"]), "clearing_s": chosen["cleared_ms"] / 1e3}
    is_restart = has_cause and plan["outcome"] == "ready" and plan["measured_ms"] is not None
    restart_s = plan["measured_ms"] / 1e3 if is_restart else 0.0
    if has_cause and plan["trigger"] == MIGRATES:
        rows = [{**cause, **clearing, "restart_s": restart_s}]
    else:
        rows = [{**own, **clearing, "restart_s": 0.0}, {**cause, "victims": 0, "clearing_s": 0.0, "restart_s": restart_s}]
    return [row for row in rows if row["victims"] or row["restart_s"]]


def select_start_charges(query: ViewUsage, dimensions: tuple[str, ...]) -> Select[Any]:
    """Sum up what keys pay for starts, by the dimensions and the kind of device.

    The columns: `cold_start_s` with its part `restart_s`, `victims` and `clearing_s`, as in
    `Counts`, and seconds times devices as `cold_device_s` and `clearing_device_s`.
    """
    charges = _charge_all(query)
    sums = [func.sum(charges.c[name]).label(name) for name in ("cold_start_s", "restart_s", "victims", "clearing_s")]
    sums += [func.sum(charges.c[n] * charges.c.devices).label(label) for n, label in _TIMES_DEVICES]
    kind = charges.c.device_kind
    return select(*select_dimensions(charges, dimensions), kind, *sums).group_by(*group_dimensions(charges, dimensions), kind)


def select_charged_phases(query: ViewUsage, dimensions: tuple[str, ...]) -> Select[Any]:
    """Sum up the parts of `cold_start_s` by the dimensions and the phase of the start.

    Starts whose phases were not recorded have no part.
    """
    charges, phases = _charge_all(query), tables.start_phases
    charged = func.sum(charges.c.cold_start_s * phases.c.share).label("cold_start_s")
    statement = select(*select_dimensions(charges, dimensions), phases.c.phase, charged)
    joined = statement.join_from(charges, phases, phases.c.plan_id == charges.c.start_id)
    return joined.group_by(*group_dimensions(charges, dimensions), phases.c.phase)


def _charge_all(query: ViewUsage) -> Subquery:
    return union_all(_charge_own_starts(query), _charge_waiters(query), _charge_owners(query)).subquery()


_TIMES_DEVICES = (("cold_start_s", "cold_device_s"), ("clearing_s", "clearing_device_s"))


def _charge_own_starts(query: ViewUsage) -> Select[Any]:
    """Split each start that no other one caused among all requests that waited for it."""
    waits, rows = tables.cold_waits, tables.displacements
    everyone = _everyone(query)
    is_restart = exists().where(rows.c.plan_id == waits.c.plan_id, rows.c.restart_s > 0)
    share = everyone.c.start_s * waits.c.requests / everyone.c.all
    charged = _columns(waits, waits, share, literal(0.0), literal(0.0), literal(0.0))
    return select(*charged).join(everyone, everyone.c.plan_id == waits.c.plan_id).where(*inside(query, waits), ~is_restart)


def _charge_waiters(query: ViewUsage) -> Select[Any]:
    """Split what starts took from others among all requests that waited for the payer."""
    waits, rows = tables.cold_waits, tables.displacements
    everyone = _everyone(query)
    restart, victims, clearing = (rows.c[n] * waits.c.requests / everyone.c.all for n in ("restart_s", "victims", "clearing_s"))
    charged = _columns(waits, rows, restart, restart, victims * 1.0, clearing)
    joined = select(*charged).join(everyone, everyone.c.plan_id == waits.c.plan_id).join(rows, rows.c.payer == waits.c.plan_id)
    return joined.where(*inside(query, waits))


def _charge_owners(query: ViewUsage) -> Select[Any]:
    """Charge owners for what starts took from others while no request has waited for the payer."""
    waits, rows = tables.cold_waits, tables.displacements
    charged = _columns(rows, rows, rows.c.restart_s, rows.c.restart_s, rows.c.victims * 1.0, rows.c.clearing_s)
    return select(*charged).where(*inside(query, rows), ~exists().where(waits.c.plan_id == rows.c.payer))


def _everyone(query: ViewUsage) -> Subquery:
    """Count the requests, whenever they ended, of starts that one of the interval waited for."""
    waits = tables.cold_waits
    return (
        select(waits.c.plan_id, func.sum(waits.c.requests).label("all"), func.max(waits.c.start_s).label("start_s"))
        .where(waits.c.plan_id.in_(select(waits.c.plan_id).where(*inside(query, waits))))  # the retention is over a year
        .group_by(waits.c.plan_id)
        .subquery()
    )


def _columns(
    table: Table,
    plan: Table,
    start: ColumnElement[Any],
    restart: ColumnElement[Any],
    victims: ColumnElement[Any],
    clearing: ColumnElement[Any],
) -> list[ColumnElement[Any]]:
    """Return the dimensions of `table`, and the amounts for the start that `plan` names."""
    names = [table.c[n].label(n) if n in table.c else literal("").label(n) for n in _DIMENSIONS]
    of_plan = [plan.c.plan_id.label("start_id"), plan.c.device_kind.label("device_kind"), plan.c.devices.label("devices")]
    amounts = (("cold_start_s", start), ("restart_s", restart), ("victims", victims), ("clearing_s", clearing))
    return [*names, *of_plan, *(amount.label(name) for name, amount in amounts)]
