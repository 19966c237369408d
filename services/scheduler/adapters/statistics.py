"""Learned parameters and loaders' last status, in the database.

They speed up a new leader and are not needed for correctness. Parameters are written with the plan
that taught them. Loader status changes every second, and a new leader receives it within two; it is
written from time to time for the nodes that changed, for the first decisions of a term and for
`thaw explain`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import delete, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.scheduler.adapters import tables
from services.scheduler.domain.cost.learned import Parameter
from services.scheduler.domain.estimates.start_times import TEMPLATE_PREFIX
from services.scheduler.domain.state.measurements import Estimate
from services.scheduler.domain.state.volatile import LoaderPresence
from shared.contracts.loader import CachedModel, LinkStatus, LoaderStatus

_UPSERT = insert(tables.parameters)
_UPSERT = _UPSERT.on_conflict_do_update(
    index_elements=["model", "node", "quantity"],
    set_={
        **{c: _UPSERT.excluded[c] for c in ("value", "error", "count")},
        "updated": text("extract(epoch from clock_timestamp())"),
    },
)
_TEMPLATES_KEPT_S = 30 * 86_400
"""Seconds that learned parameters of a template key are kept after its last start."""
_FORGET_UNKNOWN = (
    text(f"DELETE FROM parameters WHERE (model <> '' AND NOT starts_with(model, '{TEMPLATE_PREFIX}') "
         "AND model NOT IN (SELECT name FROM models)) OR (node <> '' AND node NOT IN (SELECT name FROM nodes)) "
         f"OR (starts_with(model, '{TEMPLATE_PREFIX}') AND updated < extract(epoch from clock_timestamp()) - {_TEMPLATES_KEPT_S})"),
    text("DELETE FROM profiles WHERE model NOT IN (SELECT name FROM models)"),
    text("DELETE FROM objectives WHERE model NOT IN (SELECT name FROM models)"),
    text("DELETE FROM devices WHERE node NOT IN (SELECT name FROM nodes)"),
    text("DELETE FROM residency WHERE node NOT IN (SELECT name FROM nodes)"),
    text("DELETE FROM links WHERE node NOT IN (SELECT name FROM nodes)"),
)  # fmt: skip


async def write_estimates(connection: AsyncConnection, estimates: Iterable[Estimate]) -> None:
    rows = [
        {"model": e.model, "node": e.node, "quantity": quantity, "value": p.value, "error": p.error, "count": p.count}
        for e in estimates
        for quantity, p in e.parameters.items()
    ]
    if rows:
        await connection.execute(_UPSERT, rows)


async def delete_estimates(connection: AsyncConnection, keys: Iterable[str]) -> None:
    columns = tables.parameters.c
    for key in keys:
        model, _, node = key.partition("\0")
        await connection.execute(delete(tables.parameters).where(columns.model == model, columns.node == node))


async def read_estimates(connection: AsyncConnection) -> list[Estimate]:
    found: dict[tuple[str, str], dict[str, Parameter]] = {}
    columns = tables.parameters.c
    kept = select(columns.model, columns.node, columns.quantity, columns.value, columns.error, columns["count"])
    for model, node, quantity, value, error, count in await connection.execute(kept):
        found.setdefault((model, node), {})[quantity] = Parameter(value, error, count)
    return [Estimate(model, node, parameters) for (model, node), parameters in found.items()]


async def write_loaders(connection: AsyncConnection, loaders: Iterable[LoaderPresence]) -> None:
    """Replace what is stored of these loaders' nodes."""
    known = list(loaders)
    names = [x.node for x in known]
    for table in (tables.residency, tables.links):
        await connection.execute(delete(table).where(table.c.node.in_(names)))
    if resident := [row for x in known for row in _list_resident(x)]:
        await connection.execute(insert(tables.residency), resident)
    if links := [row for x in known for row in _links(x)]:
        await connection.execute(insert(tables.links), links)


def persisted_part(x: LoaderPresence) -> tuple[object, ...]:
    """Return the part of a loader's status that is stored; unchanged parts are not rewritten."""
    status = x.status
    held = tuple((s.weights_id, s.loaded_bytes >= s.total_bytes, tuple(s.on_devices.items())) for s in status.segments)
    return (held, status.cached, status.links)


def _list_resident(x: LoaderPresence) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], int] = {}
    for s in x.status.segments:
        if s.error is None and s.loaded_bytes >= s.total_bytes > 0:
            rows[s.weights_id, "dram"] = s.total_bytes
        rows |= {(s.weights_id, device): nbytes for device, nbytes in s.on_devices.items()}
    rows |= {(c.weights_id, c.tier): c.nbytes for c in x.status.cached}
    return [
        {"node": x.node, "weights_id": weights, "tier": tier, "nbytes": n, "heard_at": x.last_message_at}
        for (weights, tier), n in rows.items()
    ]


def _links(x: LoaderPresence) -> list[dict[str, Any]]:
    return [{"node": x.node, "heard_at": x.last_message_at} | link.model_dump(exclude={"is_paced"}) for link in x.status.links]


async def read_loaders(connection: AsyncConnection, now: float) -> list[LoaderPresence]:
    """Return the stored loaders; they count as silent until their first message."""
    cached: dict[str, list[CachedModel]] = {}
    links: dict[str, list[LinkStatus]] = {}
    last_message_at: dict[str, float] = {}
    for row in await connection.execute(select(tables.residency).where(tables.residency.c.tier.in_(("dram", "ssd")))):
        cached.setdefault(row.node, []).append(CachedModel(weights_id=row.weights_id, tier=row.tier, nbytes=row.nbytes))
        last_message_at[row.node] = min(now, row.heard_at)
    for row in await connection.execute(select(tables.links)):
        # its queue has passed by now, or is reported again
        links.setdefault(row.node, []).append(LinkStatus(link=row.link, bytes_per_second=row.bytes_per_second))
        last_message_at[row.node] = min(now, row.heard_at)
    return [
        LoaderPresence(
            node, at, LoaderStatus(node=node, boot_id="", cached=tuple(cached.get(node, ())), links=tuple(links.get(node, ())))
        )
        for node, at in last_message_at.items()
    ]


async def forget_unknown(connection: AsyncConnection) -> None:
    """Delete rows of models and nodes that are gone."""
    for statement in _FORGET_UNKNOWN:
        await connection.execute(statement)
