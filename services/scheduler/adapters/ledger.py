"""The ledger of usage in Postgres.

A report is recorded in one transaction with the position of its spool, and only if it begins where
the last one ended. A repeated report, or one that was recorded before its reply was lost, changes
nothing; the reply says from where to continue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.scheduler.adapters import tables
from services.scheduler.adapters.repository import require_epoch
from shared.contracts.prices import Cost, Prices
from shared.contracts.usage import (
    MAX_ROWS_VIEWED,
    RETENTION_HOURS,
    Counts,
    ReportUsage,
    UsageRecorded,
    UsageSum,
    UsageViewed,
    ViewUsage,
)

_COUNTS = (
    "requests",
    "failed",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cold_requests",
    "compute_cpu_us",
    "compute_cuda_us",
)
Tokens = tuple[int, int, int]
"""Prompt, cached and completion tokens."""
_SPOOL_HOURS = 40 * 24
"""A spool that was silent for so long is forgotten."""


class Ledger:
    """Writer and reader of the ledger; with `prices` its sums have a cost."""

    def __init__(self, engine: AsyncEngine, prices: Prices | None = None) -> None:
        self._engine = engine
        self.prices = prices

    async def record(
        self, epoch: int, report: ReportUsage, hour: int, on_new: Callable[[ReportUsage], None] | None = None
    ) -> UsageRecorded:
        """Record a report that continues its spool.

        Args:
            epoch: The leader's epoch.
            hour: The present hour.
            on_new: Called once the report is recorded, unless it was recorded before.

        Raises:
            StaleEpoch: `epoch` is not the present one.
        """
        async with self._engine.begin() as connection:
            await require_epoch(connection, epoch)
            spools = tables.usage_spools
            await connection.execute(
                insert(spools).values(spool=report.spool, position=0, hour=hour).on_conflict_do_nothing(index_elements=["spool"])
            )
            where = spools.c.spool == report.spool
            position = int((await connection.execute(select(spools.c.position).where(where).with_for_update())).scalar_one())
            if position != report.start:
                return UsageRecorded(position=position)
            await connection.execute(spools.update().where(where).values(position=report.end, hour=hour))
            await _add_rows(connection, report)
        if on_new is not None:
            on_new(report)
        return UsageRecorded(position=report.end)

    async def view(self, query: ViewUsage) -> UsageViewed:
        """Sum up the interval."""
        # Models have prices of their own, so costs are summed over models, not computed from sums.
        by = query.by if self.prices is None else tuple(dict.fromkeys((*query.by, "model")))
        sums: dict[tuple[Any, ...], _Sum] = {}
        async with self._engine.connect() as connection:
            for row in (await connection.execute(_sums(query, by))).mappings():
                sums[tuple(row[name] for name in by)] = _Sum({name: int(row[name] or 0) for name in _COUNTS})
            for row in (await connection.execute(_shares(query, by))).mappings():
                found = sums.setdefault(tuple(row[name] for name in by), _Sum())
                found.cold_start_s += float(row["cold_start_s"] or 0.0)
                found.device_s[row["device_kind"]] = found.device_s.get(row["device_kind"], 0.0) + float(row["device_s"] or 0.0)
        totals: dict[tuple[Any, ...], _Sum] = {}
        for name, found in sums.items():
            values = dict(zip(by, name, strict=True))
            if self.prices is not None:
                found.cost = _cost(found, values["model"], self.prices)
            totals.setdefault(tuple(values[dimension] for dimension in query.by), _Sum()).add(found)
        rows = [
            UsageSum(
                **dict(zip(query.by, name, strict=True)),
                counts=Counts(
                    **{n: total.counts.get(n, 0) for n in _COUNTS},
                    cold_start_s=total.cold_start_s,
                    cold_device_s=sum(total.device_s.values()),
                ),
                cost=total.cost if self.prices is not None else None,
            )
            for name, total in totals.items()
        ]
        rows.sort(key=lambda s: (-s.counts.prompt_tokens - s.counts.completion_tokens, -s.counts.requests, str(s)))
        currency = self.prices.currency if self.prices is not None else None
        return UsageViewed(rows=tuple(rows[:MAX_ROWS_VIEWED]), complete=len(rows) <= MAX_ROWS_VIEWED, currency=currency)

    async def sum_tokens(self, since: int) -> dict[tuple[str, str], Tokens]:
        """Sum up the tokens from an hour on, by key and model."""
        query = ViewUsage(since=since, by=("key", "model"))
        async with self._engine.connect() as connection:
            rows = (await connection.execute(_sums(query, query.by))).mappings()
            return {
                (row["key"], row["model"]): (int(row["prompt_tokens"]), int(row["cached_tokens"]), int(row["completion_tokens"]))
                for row in rows
            }

    async def sum_device_s(self, since: int) -> dict[str, dict[str, float]]:
        """Sum up the device-seconds of cold starts from an hour on, by key and kind of device."""
        found: dict[str, dict[str, float]] = {}
        async with self._engine.connect() as connection:
            for row in (await connection.execute(_shares(ViewUsage(since=since), ("key",)))).mappings():
                found.setdefault(row["key"], {})[row["device_kind"]] = float(row["device_s"] or 0.0)
        return found

    async def prune(self, epoch: int, hour: int) -> None:
        """Delete hours beyond the retention, and spools that are silent for long.

        Raises:
            StaleEpoch: `epoch` is not the present one.
        """
        async with self._engine.begin() as connection:
            await require_epoch(connection, epoch)
            for table in (tables.usage, tables.cold_waits):
                await connection.execute(delete(table).where(table.c.hour < hour - RETENTION_HOURS))
            await connection.execute(delete(tables.usage_spools).where(tables.usage_spools.c.hour < hour - _SPOOL_HOURS))


@dataclass(slots=True)
class _Sum:
    """Sums of one combination of the dimensions; `device_s`: by the kind of the device."""

    counts: dict[str, int] = field(default_factory=dict)
    cold_start_s: float = 0.0
    device_s: dict[str, float] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)

    def add(self, other: _Sum) -> None:
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for kind, seconds in other.device_s.items():
            self.device_s[kind] = self.device_s.get(kind, 0.0) + seconds
        self.cold_start_s += other.cold_start_s
        self.cost = self.cost.plus(other.cost)


def _cost(found: _Sum, model: str, prices: Prices) -> Cost:
    counts = found.counts
    tokens = (counts.get("prompt_tokens", 0), counts.get("cached_tokens", 0), counts.get("completion_tokens", 0))
    return prices.cost(model, tokens, found.device_s)


async def _add_rows(connection: AsyncConnection, report: ReportUsage) -> None:
    if report.rows:
        table = tables.usage
        statement = insert(table)
        added = {name: table.c[name] + statement.excluded[name] for name in _COUNTS}
        rows = [
            {"hour": r.hour, "key": r.key, "model": r.model, "adapter": r.adapter, **{n: getattr(r.counts, n) for n in _COUNTS}}
            for r in report.rows
        ]
        await connection.execute(
            statement.on_conflict_do_update(index_elements=["hour", "key", "model", "adapter"], set_=added), rows
        )
    if report.waits:
        table = tables.cold_waits
        statement = insert(table)
        added = {"requests": table.c.requests + statement.excluded.requests}
        await connection.execute(
            statement.on_conflict_do_update(index_elements=["plan_id", "key", "model", "adapter"], set_=added),
            [wait.model_dump() for wait in report.waits],
        )


def _inside(query: ViewUsage, table: Table) -> list[ColumnElement[bool]]:
    """Return the conditions of a row that the query asks for."""
    conditions = [table.c.hour >= query.since]
    if query.until is not None:
        conditions.append(table.c.hour < query.until)
    if query.model is not None:
        conditions.append(table.c.model == query.model)
    return conditions


def _sums(query: ViewUsage, dimensions: tuple[str, ...]) -> Select[Any]:
    table = tables.usage
    by = [table.c[name] for name in dimensions]
    statement = select(*by, *(func.sum(table.c[name]).label(name) for name in _COUNTS)).where(*_inside(query, table))
    return statement.group_by(*by) if by else statement


def _shares(query: ViewUsage, dimensions: tuple[str, ...]) -> Select[Any]:
    """Split each start among all requests that waited for it, whenever they ended."""
    table = tables.cold_waits
    inside = _inside(query, table)
    everyone = (
        select(table.c.plan_id, func.sum(table.c.requests).label("all"), func.max(table.c.start_s).label("start_s"))
        .where(table.c.plan_id.in_(select(table.c.plan_id).where(*inside)))  # the retention is over a year
        .group_by(table.c.plan_id)
        .subquery()
    )
    by = [*(table.c[name] for name in dimensions), table.c.device_kind]
    share = everyone.c.start_s * table.c.requests / everyone.c.all
    shares = (func.sum(share).label("cold_start_s"), func.sum(share * table.c.devices).label("device_s"))
    return select(*by, *shares).join(everyone, everyone.c.plan_id == table.c.plan_id).where(*inside).group_by(*by)
