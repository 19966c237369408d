"""The phases of starts in the ledger: which part of a start's seconds was fetching, loading, etc.

The parts are those of the critical path, which tiles the start without gap or overlap. They are
stored as shares of 1, so that the phases of what a key pays for a start add up to what it pays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import RowMapping, exists, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.scheduler.adapters import tables
from shared.contracts.phases import PhaseSpan
from shared.telemetry.critical_path import critical_path

_SPANS = TypeAdapter(tuple[PhaseSpan, ...])


async def record_start_phases(connection: AsyncConnection, since: float) -> None:
    """Record the phases of the ready starts since `since` (Unix seconds), each once.

    Args:
        connection: A transaction that is guarded by the leader's epoch.
        since: Time of the oldest plan.
    """
    plans, phases = tables.plans, tables.start_phases
    asked = (
        select(plans.c.plan_id, plans.c.created, plans.c.measured, plans.c.measured_ms)
        .where(plans.c.created >= since, plans.c.outcome == "ready", plans.c.measured_ms > 0)
        .where(func.jsonb_array_length(plans.c.measured) > 0)
        .where(~exists().where(phases.c.plan_id == plans.c.plan_id))
    )
    found = (await connection.execute(asked)).mappings()
    if rows := [row for plan in found for row in list_phases(plan)]:
        await connection.execute(insert(phases).on_conflict_do_nothing(index_elements=["plan_id", "phase"]), rows)


def list_phases(plan: RowMapping | Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a plan that became ready: each phase's share of its seconds.

    The shares add up to 1.
    """
    spans, took_ms = _SPANS.validate_python(plan["measured"]), float(plan["measured_ms"])
    shares: dict[str, float] = {}
    for segment in critical_path(spans, 0.0, took_ms):
        shares[segment.phase.value] = shares.get(segment.phase.value, 0.0) + segment.duration_ms / took_ms
    hour = int(plan["created"] // 3600)
    return [{"plan_id": plan["plan_id"], "phase": phase, "hour": hour, "share": share} for phase, share in shares.items()]
