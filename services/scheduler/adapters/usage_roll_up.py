"""Roll-up of the ledger: old hours are summed up by day.

A row of an old hour is added to the row of its day's first hour, in one transaction, so that each
sum over whole days stays as it is, whenever the process ends.
"""

from __future__ import annotations

from sqlalchemy import Table, delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.scheduler.adapters import tables
from services.scheduler.adapters.usage_dimensions import day_of


async def roll_up(connection: AsyncConnection, before: int) -> None:
    """Sum up the hours before `before`, the first hour of a day, by day.

    Args:
        connection: A transaction that is guarded by the leader's epoch.
        before: Hours since 1970.
    """
    for table in (tables.usage, tables.held_memory, tables.background_work):
        await _roll_up_table(connection, table, before)


async def _roll_up_table(connection: AsyncConnection, table: Table, before: int) -> None:
    keys = [c for c in table.primary_key if c.name != "hour"]
    amounts = [c for c in table.c if not c.primary_key]
    day = day_of(table)
    is_old = (table.c.hour < before) & (table.c.hour != day)
    sums = select(day.label("hour"), *keys, *(func.sum(c).label(c.name) for c in amounts)).where(is_old).group_by(day, *keys)
    statement = insert(table).from_select(["hour", *(c.name for c in keys), *(c.name for c in amounts)], sums)
    added = {c.name: c + statement.excluded[c.name] for c in amounts}
    await connection.execute(statement.on_conflict_do_update(index_elements=[c.name for c in table.primary_key], set_=added))
    await connection.execute(delete(table).where(is_old))
