"""The columns that queries of the ledger select and group by."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Subquery, Table, literal, literal_column

from shared.contracts.usage import HOURS_PER_DAY, ViewUsage


def inside(query: ViewUsage, table: Table) -> list[ColumnElement[bool]]:
    """Return the conditions of a row that the query asks for."""
    conditions = [table.c.hour >= query.since]
    if query.until is not None:
        conditions.append(table.c.hour < query.until)
    if query.model is not None:
        conditions.append(table.c.model == query.model)
    return conditions


def day_of(table: Table | Subquery) -> ColumnElement[int]:
    """Return the first hour of a row's day in UTC.

    The divisor is part of the text: PostgreSQL takes an expression with a parameter for another one
    when it is grouped by.
    """
    return table.c.hour - table.c.hour % literal_column(str(HOURS_PER_DAY))


def select_dimensions(table: Table | Subquery, dimensions: tuple[str, ...]) -> list[ColumnElement[Any]]:
    """Return a labelled column for each dimension. Rows of a table without adapters have none."""
    return [_find(table, name).label(name) for name in dimensions]


def group_dimensions(table: Table | Subquery, dimensions: tuple[str, ...]) -> list[ColumnElement[Any]]:
    """Return what to group by; constants are left out."""
    return [_find(table, name) for name in dimensions if name == "day" or name in table.c]


def _find(table: Table | Subquery, name: str) -> ColumnElement[Any]:
    if name == "day":
        return day_of(table)
    return table.c[name] if name in table.c else literal("")
