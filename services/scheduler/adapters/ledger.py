"""The ledger of usage in Postgres.

A report is recorded in one transaction with the position of its spool, and only if it begins where
the last one ended. A repeated report, or one that was recorded before its reply was lost, changes
nothing; the reply says from where to continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import RowMapping, Select, delete, exists, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.scheduler.adapters import tables
from services.scheduler.adapters.background_charges import record_background, select_background
from services.scheduler.adapters.device_accounts import add_recorded, settle_accounts
from services.scheduler.adapters.repository import require_epoch
from services.scheduler.adapters.start_charges import record_displacements, select_charged_phases, select_start_charges
from services.scheduler.adapters.start_phases import record_start_phases
from services.scheduler.adapters.usage_dimensions import group_dimensions, inside, select_dimensions
from services.scheduler.adapters.usage_roll_up import roll_up
from services.scheduler.domain.background_work import BackgroundReading
from services.scheduler.domain.device_accounts import Account, AccountName
from shared.contracts.prices import Cost, Prices
from shared.contracts.usage import (
    HOURLY_HOURS,
    HOURS_PER_DAY,
    MAX_ROWS_VIEWED,
    RETENTION_HOURS,
    ColdWait,
    Counts,
    ReportUsage,
    UsageRecorded,
    UsageRow,
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
_COMPUTING = ("compute_cpu_us", "compute_cuda_us")
_KEPT = (
    tables.usage,
    tables.displacements,
    tables.cold_waits,
    tables.start_phases,
    tables.held_memory,
    tables.background_work,
)
"""Tables with the rows of `RETENTION_HOURS`."""
_STARTS = ("cold_start_s", "restart_s", "victims", "clearing_s")
Tokens = tuple[int, int, int]
"""Prompt, cached and completion tokens."""
_UNASKED = ("consolidation", "min_replicas", "park", "wake")
"""Triggers of starts that are made without a request."""
_SPOOL_HOURS = 40 * 24
"""A spool that was silent for so long is forgotten, and so is the id of a response."""
CLOCKS_KEPT_S = _SPOOL_HOURS * 3600.0
"""The clock of a node that was silent for so long is forgotten."""


VIEWS_AT_ONCE = 2
"""Views of operators that read the database at a time. They leave a connection to the records."""


class Ledger:
    """Writer and reader of the ledger; with `prices` its sums have a cost."""

    def __init__(self, engine: AsyncEngine, prices: Prices | None = None) -> None:
        self._engine = engine
        self.prices = prices
        self._viewing = asyncio.Semaphore(VIEWS_AT_ONCE)

    async def record(
        self, epoch: int, report: ReportUsage, hour: int, on_new: Callable[[ReportUsage], None] | None = None
    ) -> UsageRecorded:
        """Record a report that continues its spool.

        Args:
            epoch: The leader's epoch.
            hour: The present hour.
            on_new: Called with what is new of the report, once it is recorded.

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
            report = await _without_known_responses(connection, report)
            await add_recorded(connection, report, hour)
            await _add_rows(connection, report.rows, report.waits)
            for response in report.responses:
                await _add_rows(connection, (response.row,), (response.wait,) if response.wait is not None else ())
        if on_new is not None:
            on_new(report)
        return UsageRecorded(position=report.end)

    async def view(self, query: ViewUsage) -> UsageViewed:
        """Sum up the interval."""
        # Models have prices of their own, so costs are summed over models, not computed from sums.
        by = query.by if self.prices is None else tuple(dict.fromkeys((*query.by, "model")))
        sums: dict[tuple[Any, ...], _Sum] = {}
        async with self._viewing, self._engine.connect() as connection:
            for row in (await connection.execute(_sums(query, by))).mappings():
                sums[tuple(row[name] for name in by)] = _Sum({name: int(row[name] or 0) for name in _COUNTS})
            for row in (await connection.execute(select_start_charges(query, by))).mappings():
                sums.setdefault(tuple(row[name] for name in by), _Sum()).add_starts(row)
            for row in (await connection.execute(select_charged_phases(query, by))).mappings():
                phases = sums.setdefault(tuple(row[name] for name in by), _Sum()).phases
                phases[row["phase"]] = phases.get(row["phase"], 0.0) + float(row["cold_start_s"] or 0.0)
            for row in (await connection.execute(select_background(query, by))).mappings():
                found = sums.setdefault(tuple(row[name] for name in by), _Sum())
                found.background_us[row["device_kind"]] = float(row["us"])
            for row in (await connection.execute(_select_held(query, by))).mappings():
                found = sums.setdefault(tuple(row[name] for name in by), _Sum())
                found.byte_s[row["kind"]] = found.byte_s.get(row["kind"], 0.0) + float(row["byte_s"] or 0.0)
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
                    **{n: total.counts.get(n, 0) for n in _COUNTS if n not in _COMPUTING},
                    **{f"compute_{kind}_us": us for kind, us in total.compute_us.items()},
                    background_s=sum(total.background_us.values()) / 1e6,
                    **total.starts,
                    cold_device_s=sum(total.device_s.values()),
                    clearing_device_s=sum(total.clearing_s.values()),
                    **{f"held_{kind}_byte_s": amount for kind, amount in total.byte_s.items()},
                ),
                cold_start_phases_s={phase: s for phase, s in sorted(total.phases.items()) if s},
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

    async def sum_compute_us(self, since: int) -> dict[str, dict[str, int]]:
        """Sum up the microseconds of computing from an hour on, by key and kind of device."""
        async with self._engine.connect() as connection:
            rows = (await connection.execute(_sums(ViewUsage(since=since), ("key",)))).mappings()
            return {row["key"]: compute_us(row) for row in rows}

    async def sum_starts(self, since: int) -> dict[str, StartSeconds]:
        """Sum up what keys pay for starts from an hour on."""
        found: dict[str, StartSeconds] = {}
        async with self._engine.connect() as connection:
            for row in (await connection.execute(select_start_charges(ViewUsage(since=since), ("key",)))).mappings():
                of_key = found.setdefault(row["key"], StartSeconds())
                of_key.cold[row["device_kind"]] = float(row["cold_device_s"])
                of_key.clearing[row["device_kind"]] = float(row["clearing_device_s"])
        return found

    async def sum_background_us(self, since: int) -> dict[str, dict[str, float]]:
        """Sum up the microseconds of no request from an hour on, by key and kind of device."""
        found: dict[str, dict[str, float]] = {}
        async with self._engine.connect() as connection:
            for row in (await connection.execute(select_background(ViewUsage(since=since), ("key",)))).mappings():
                found.setdefault(row["key"], {})[row["device_kind"]] = float(row["us"])
        return found

    async def record_background(
        self,
        epoch: int,
        readings: Sequence[BackgroundReading],
        hour: int,
        owner: Callable[[str], str],
        older: Container[str] = (),
    ) -> None:
        """Record what engines have worked for no request; see `background_charges`.

        Raises:
            StaleEpoch: `epoch` is not the present one.
        """
        async with self._engine.begin() as connection:
            await require_epoch(connection, epoch)
            await record_background(connection, readings, hour, owner, older)

    async def settle_accounts(
        self,
        epoch: int,
        settled: Mapping[AccountName, Account],
        uncounted: Iterable[AccountName],
        hour: int,
        owner: Callable[[str], str],
    ) -> dict[AccountName, Account]:
        """Charge what engines have charged and no gateway has recorded; see `device_accounts`.

        Raises:
            StaleEpoch: `epoch` is not the present one.
        """
        async with self._engine.begin() as connection:
            await require_epoch(connection, epoch)
            return await settle_accounts(connection, settled, uncounted, hour, owner)

    async def record_held(self, epoch: int, batches: Iterable[HeldBatch]) -> None:
        """Record memory held, in one transaction with the nodes' clocks.

        A batch that begins before its node's clock was recorded before, and changes nothing.

        Raises:
            StaleEpoch: `epoch` is not the present one.
        """
        async with self._engine.begin() as connection:
            await require_epoch(connection, epoch)
            clocks = await _read_clocks(connection)
            new = [b for b in batches if b.start >= clocks.get(b.node, b.start)]
            table, amounts = tables.held_memory, _sum_up(new)
            if amounts:
                statement = insert(table)
                more = {"byte_s": table.c.byte_s + statement.excluded.byte_s}
                await connection.execute(
                    statement.on_conflict_do_update(index_elements=["hour", "key", "model", "kind"], set_=more),
                    [
                        dict(zip(("hour", "key", "model", "kind"), key, strict=True), byte_s=amount)
                        for key, amount in amounts.items()
                    ],
                )
            if new:
                clock = insert(tables.held_clocks)
                await connection.execute(
                    clock.on_conflict_do_update(index_elements=["node"], set_={"until": clock.excluded.until}),
                    [{"node": b.node, "until": b.end} for b in new],
                )

    async def record_starts(self, epoch: int, since: float, owner: Callable[[str], str], given_up: float = 0.0) -> None:
        """Charge starts that no request asked for, or waited for, to their models' owners.

        Requests that waited for such a start share it with the owner, who counts as one of them.
        What starts took from others and their phases are recorded as well. A start that was
        recorded before changes nothing.

        Args:
            epoch: The leader's epoch.
            since: Unix seconds of the oldest plan.
            owner: Returns the key that is charged for a model.
            given_up: Plans before it (Unix seconds) for which no request has waited count as starts
                that no request asked for: their requests were given up, or migrated.

        Raises:
            StaleEpoch: `epoch` is not the present one.
        """
        plans = tables.plans
        ready = (plans.c.created >= since) & (plans.c.outcome == "ready") & plans.c.measured_ms.is_not(None)
        asked = select(plans.c.plan_id, plans.c.model, plans.c.created, plans.c.measured_ms, plans.c.chosen)
        async with self._engine.begin() as connection:
            await require_epoch(connection, epoch)
            waits = tables.cold_waits
            is_given_up = (plans.c.created < given_up) & ~exists().where(waits.c.plan_id == plans.c.plan_id)
            found = (await connection.execute(asked.where(ready, plans.c.trigger.in_(_UNASKED) | is_given_up))).mappings()
            if rows := [_wait_of_owner(row, owner(row["model"])) for row in found if row["chosen"] is not None]:
                starts = insert(waits).on_conflict_do_nothing(index_elements=["plan_id", "key", "model", "adapter"])
                await connection.execute(starts, [wait.model_dump() for wait in rows])
            await record_displacements(connection, since, owner)
            await record_start_phases(connection, since)

    async def read_held_clocks(self) -> dict[str, float]:
        """Return the time up to which each node's memory is recorded, in Unix seconds."""
        async with self._engine.connect() as connection:
            return await _read_clocks(connection)

    async def sum_byte_s(self, since: int) -> dict[str, dict[str, float]]:
        """Sum up the byte-seconds held from an hour on, by key and kind of memory."""
        found: dict[str, dict[str, float]] = {}
        async with self._engine.connect() as connection:
            for row in (await connection.execute(_select_held(ViewUsage(since=since), ("key",)))).mappings():
                found.setdefault(row["key"], {})[row["kind"]] = float(row["byte_s"] or 0.0)
        return found

    async def prune(self, epoch: int, hour: int) -> None:
        """Delete days beyond the retention and silent spools, and sum up old hours by day.

        Raises:
            StaleEpoch: `epoch` is not the present one.
        """
        async with self._engine.begin() as connection:
            await require_epoch(connection, epoch)
            for table in _KEPT:
                await connection.execute(delete(table).where(table.c.hour < _first_of_day(hour - RETENTION_HOURS)))
            clocks = tables.held_clocks
            await connection.execute(delete(clocks).where(clocks.c.until < hour * 3600.0 - CLOCKS_KEPT_S))
            for table in (
                tables.usage_spools,
                tables.metered_responses,
                tables.background_readings,
                tables.device_accounts,
            ):
                await connection.execute(delete(table).where(table.c.hour < hour - _SPOOL_HOURS))
            await roll_up(connection, _first_of_day(hour - HOURLY_HOURS))


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """Memory held on a node from `start` to `end` (Unix seconds).

    Attributes:
        rows: Byte-seconds by hour, key, model and kind of memory.
    """

    node: str
    start: float
    end: float
    rows: Mapping[tuple[int, str, str, str], float]


@dataclass(slots=True)
class _Sum:
    """Sums of one combination of the dimensions.

    Attributes:
        starts: Counts by the names of `Counts`.
        phases: Seconds of starts by phase.
        device_s: Device-seconds of starts, by the kind of the device.
        clearing_s: Device-seconds of clearing, by the kind of the device.
        byte_s: Byte-seconds by the kind of the memory.
        background_us: Microseconds of computing for no request, by the kind of the device.
    """

    counts: dict[str, int] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    device_s: dict[str, float] = field(default_factory=dict)
    clearing_s: dict[str, float] = field(default_factory=dict)
    byte_s: dict[str, float] = field(default_factory=dict)
    background_us: dict[str, float] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)

    def add(self, other: _Sum) -> None:
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for mine, others in (
            (self.starts, other.starts),
            (self.phases, other.phases),
            (self.device_s, other.device_s),
            (self.clearing_s, other.clearing_s),
            (self.byte_s, other.byte_s),
            (self.background_us, other.background_us),
        ):
            for name, amount in others.items():
                mine[name] = mine.get(name, 0.0) + amount
        self.cost = self.cost.plus(other.cost)

    @property
    def compute_us(self) -> dict[str, int]:
        """Microseconds of computing by kind of device, for requests and for none."""
        return {kind: us + round(self.background_us.get(kind, 0.0)) for kind, us in compute_us(self.counts).items()}

    def add_starts(self, row: RowMapping) -> None:
        """Add a row of `select_start_charges`."""
        kind = row["device_kind"]
        for name in _STARTS:
            self.starts[name] = self.starts.get(name, 0.0) + float(row[name])
        self.device_s[kind] = self.device_s.get(kind, 0.0) + float(row["cold_device_s"])
        self.clearing_s[kind] = self.clearing_s.get(kind, 0.0) + float(row["clearing_device_s"])


@dataclass(frozen=True, slots=True)
class StartSeconds:
    """Device-seconds of starts and of clearing that a key pays, by the kind of the device."""

    cold: dict[str, float] = field(default_factory=dict)
    clearing: dict[str, float] = field(default_factory=dict)


def _cost(found: _Sum, model: str, prices: Prices) -> Cost:
    counts = found.counts
    tokens = (counts.get("prompt_tokens", 0), counts.get("cached_tokens", 0), counts.get("completion_tokens", 0))
    return prices.cost(model, tokens, found.device_s, found.byte_s, found.compute_us, found.clearing_s)


def compute_us(counts: Mapping[str, Any]) -> dict[str, int]:
    """Return the microseconds of computing by kind of device, of sums by the names of `Counts`."""
    return {"cpu": int(counts.get("compute_cpu_us") or 0), "cuda": int(counts.get("compute_cuda_us") or 0)}


def _first_of_day(hour: int) -> int:
    return hour // HOURS_PER_DAY * HOURS_PER_DAY


async def _without_known_responses(connection: AsyncConnection, report: ReportUsage) -> ReportUsage:
    """Leave out the responses that other gateways have reported, and remember the others."""
    if not report.responses:
        return report
    table = tables.metered_responses
    hours = {response.answer_id: response.row.hour for response in report.responses}
    statement = insert(table).values([{"answer_id": answer_id, "hour": hour} for answer_id, hour in hours.items()])
    inserted = statement.on_conflict_do_nothing(index_elements=["answer_id"]).returning(table.c.answer_id)
    new = set((await connection.execute(inserted)).scalars())
    by_id = {response.answer_id: response for response in report.responses if response.answer_id in new}
    return report.model_copy(update={"responses": tuple(by_id.values())})


async def _add_rows(connection: AsyncConnection, rows: Sequence[UsageRow], waits: Sequence[ColdWait]) -> None:
    if rows:
        table = tables.usage
        statement = insert(table)
        added = {name: table.c[name] + statement.excluded[name] for name in _COUNTS}
        values = [
            {"hour": r.hour, "key": r.key, "model": r.model, "adapter": r.adapter, **{n: getattr(r.counts, n) for n in _COUNTS}}
            for r in rows
        ]
        await connection.execute(
            statement.on_conflict_do_update(index_elements=["hour", "key", "model", "adapter"], set_=added), values
        )
    if waits:
        table = tables.cold_waits
        statement = insert(table)
        added = {"requests": table.c.requests + statement.excluded.requests}
        await connection.execute(
            statement.on_conflict_do_update(index_elements=["plan_id", "key", "model", "adapter"], set_=added),
            [wait.model_dump() for wait in waits],
        )


def _sums(query: ViewUsage, dimensions: tuple[str, ...]) -> Select[Any]:
    table = tables.usage
    sums = [func.sum(table.c[name]).label(name) for name in _COUNTS]
    statement = select(*select_dimensions(table, dimensions), *sums).where(*inside(query, table))
    return statement.group_by(*group_dimensions(table, dimensions)) if dimensions else statement


async def _read_clocks(connection: AsyncConnection) -> dict[str, float]:
    rows = await connection.execute(select(tables.held_clocks.c.node, tables.held_clocks.c.until))
    return {str(node): float(until) for node, until in rows}


def _wait_of_owner(plan: RowMapping, owner: str) -> ColdWait:
    devices: list[str] = plan["chosen"]["device_ids"] or [""]
    return ColdWait(
        plan_id=plan["plan_id"],
        hour=int(plan["created"] // 3600),
        key=owner,
        model=plan["model"],
        requests=1,
        start_s=plan["measured_ms"] / 1e3,
        device_kind=devices[0].partition(":")[0],
        devices=len(devices),
    )


def _sum_up(batches: Iterable[HeldBatch]) -> dict[tuple[int, str, str, str], float]:
    amounts: dict[tuple[int, str, str, str], float] = {}
    for batch in batches:
        for key, amount in batch.rows.items():
            amounts[key] = amounts.get(key, 0.0) + amount
    return amounts


def _select_held(query: ViewUsage, dimensions: tuple[str, ...]) -> Select[Any]:
    table = tables.held_memory
    columns = [*select_dimensions(table, dimensions), table.c.kind, func.sum(table.c.byte_s).label("byte_s")]
    return select(*columns).where(*inside(query, table)).group_by(*group_dimensions(table, dimensions), table.c.kind)
