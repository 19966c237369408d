"""Accounts of device time in the ledger: charged by engines, recorded by gateways (docs/adr/0101).

What gateways record is added in the transaction of their report, and what engines have charged in
that of their readings. So each counts once, whichever leader records it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.scheduler.adapters import tables
from services.scheduler.domain.device_accounts import Account, AccountName, find_correction
from shared.contracts.usage import ReportUsage

UNRECORDED = "(unrecorded)"
"""Stands for the plan in `background_work`: the owner pays, as no request waited for it."""
_ROW = ("hour", "key", "model", "plan_id", "device_kind")


async def add_recorded(connection: AsyncConnection, report: ReportUsage, hour: int) -> None:
    """Add what a gateway reports of requests. Responses that count already must be left out."""
    amounts: dict[AccountName, int] = {}
    for row in (*report.rows, *(response.row for response in report.responses)):
        for kind, us in (("cpu", row.counts.compute_cpu_us), ("cuda", row.counts.compute_cuda_us)):
            if us:
                amounts[row.model, kind] = amounts.get((row.model, kind), 0) + us
    await _add(connection, "recorded_us", amounts, hour)


async def add_charged(connection: AsyncConnection, amounts: Mapping[AccountName, int], hour: int) -> None:
    """Add what engines have charged to requests since their last readings."""
    await _add(connection, "charged_us", amounts, hour)


async def _add(connection: AsyncConnection, column: str, amounts: Mapping[AccountName, int], hour: int) -> None:
    if not amounts:
        return
    table = tables.device_accounts
    statement = insert(table)
    added = {column: table.c[column] + statement.excluded[column], "hour": statement.excluded.hour}
    values = [
        {"model": model, "device_kind": kind, "charged_us": 0, "recorded_us": 0, "unrecorded_us": 0, "hour": hour, column: us}
        for (model, kind), us in sorted(amounts.items())  # in one order: reports of two gateways wait, and do not deadlock
    ]
    await connection.execute(statement.on_conflict_do_update(index_elements=["model", "device_kind"], set_=added), values)


async def settle_accounts(
    connection: AsyncConnection,
    settled: Mapping[AccountName, Account],
    uncounted: Iterable[AccountName],
    hour: int,
    owner: Callable[[str], str],
) -> dict[AccountName, Account]:
    """Charge what no gateway has recorded to the owners, and take back what one has since.

    Args:
        connection: A transaction that is guarded by the leader's epoch.
        settled: The accounts of some time ago (`find_correction`).
        uncounted: Accounts with engines that do not say what they charge.
        hour: The present hour.
        owner: Returns the key that pays for a model's work without a request.

    Returns:
        All accounts as they were read.
    """
    table, skipped = tables.device_accounts, set(uncounted)
    rows = await connection.execute(
        select(table.c.model, table.c.device_kind, table.c.charged_us, table.c.recorded_us, table.c.unrecorded_us)
    )
    accounts = {(str(model), str(kind)): Account(int(c), int(r), int(u)) for model, kind, c, r, u in rows}
    for name, account in accounts.items():
        if name in skipped:
            await _balance(connection, name, account)
        elif (then := settled.get(name)) is not None and (us := find_correction(then, account)):
            await _correct(connection, name, us, hour, owner(name[0]))
    return accounts


async def _balance(connection: AsyncConnection, name: AccountName, account: Account) -> None:
    """Count what gateways recorded as charged, or the reverse: nothing is known to be missing."""
    gap = account.charged_us - account.recorded_us - account.unrecorded_us
    table = tables.device_accounts
    values = {"recorded_us": table.c.recorded_us + gap} if gap > 0 else {"charged_us": table.c.charged_us - gap}
    if gap:
        await connection.execute(update(table).where(*_is(name)).values(**values))


async def _correct(connection: AsyncConnection, name: AccountName, us: int, hour: int, key: str) -> None:
    table = tables.device_accounts
    await connection.execute(update(table).where(*_is(name)).values(unrecorded_us=table.c.unrecorded_us + us))
    if us < 0:
        await _take_back(connection, name, -us)
        return
    work = tables.background_work
    statement = insert(work)
    row = (hour, key, name[0], UNRECORDED, name[1])
    await connection.execute(
        statement.on_conflict_do_update(index_elements=list(_ROW), set_={"us": work.c.us + statement.excluded.us}),
        [dict(zip(_ROW, row, strict=True), us=us)],
    )


async def _take_back(connection: AsyncConnection, name: AccountName, us: int) -> None:
    """Take it from the newest hours, of which none becomes negative."""
    work = tables.background_work
    model, kind = name
    mine = (work.c.model == model, work.c.device_kind == kind, work.c.plan_id == UNRECORDED, work.c.us > 0)
    rows = await connection.execute(select(work.c.hour, work.c.key, work.c.us).where(*mine).order_by(work.c.hour.desc()))
    for hour, key, has in rows.all():
        taken = min(us, int(has))
        at = (*mine, work.c.hour == hour, work.c.key == key)
        await connection.execute(update(work).where(*at).values(us=work.c.us - taken))
        us -= taken
        if not us:
            return


def _is(name: AccountName) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    table = tables.device_accounts
    return table.c.model == name[0], table.c.device_kind == name[1]
