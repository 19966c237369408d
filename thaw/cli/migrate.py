"""Implement `thaw migrate`: move running requests to another engine.

Clients do not notice the move.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from shared.contracts.admin import ClusterView
from shared.contracts.migration import MigrationRecord
from thaw.cli.api import Api
from thaw.cli.handovers import is_attempt_of, migration_lines
from thaw.cli.output import Document, Json, screen, verb
from thaw.errors import CommandError


@verb
def migrate(
    what: Annotated[
        str,
        typer.Argument(
            help="A request's id (the x-request-id of its answer), or an instance's, as `thaw ps` shows it.", metavar="REQUEST"
        ),
    ],
    to: Annotated[
        str | None, typer.Option("--to", help="Node, or NODE:DEVICE, e.g. node-1:cpu:0; the scheduler chooses by default.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the migration to end.")] = False,
    as_json: Json = False,
) -> Document:
    """Move a running request, or all requests of an instance, to another node.

    Example: [bold]thaw migrate i-100000002.node-0 --to node-1[/]
    """
    api, out = Api.find(), screen(as_json)
    node, _, device = (to or "").partition(":")
    if to is not None and not node:
        raise CommandError(f"--to {to} names no node.", "Write NODE or NODE:DEVICE.", code="bad_target")
    is_instance = _is_instance(api.cluster(), what)
    if not is_instance and what.startswith("i-"):
        raise CommandError(f"No instance {what!r} is running now.", "`thaw ps` lists the instances.", code="not_found")
    try:
        records = api.migrate(what, is_instance=is_instance, node=node or None, device=device or None, wait=not detach)
    except CommandError as e:
        if e.code == "not_found" and not is_instance and what not in e.what:
            raise CommandError(
                f"No request or instance {what!r} is running now.", "`thaw ps` lists the instances.", code="not_found"
            ) from e
        raise
    for record in records:
        out.print(describe(record, None if is_instance else what))
    failed = any(r.state in ("failed", "given_up") for r in records)
    return {"ok": not failed, "migrations": [r.model_dump(mode="json") for r in records]}


def _is_instance(cluster: ClusterView, what: str) -> bool:
    return any(i.instance_id == what for n in cluster.nodes for i in n.instances)


def describe(record: MigrationRecord, asked: str | None = None) -> str:
    """Describe a migration in one line.

    Args:
        asked: The request's id as its client knows it; engines and gateways use another id.
    """
    line = _describe(record, asked or record.request_id)
    return line if asked is None or record.request_id is None else line.replace(escape(record.request_id), escape(asked))


def _describe(record: MigrationRecord, request_id: str | None) -> str:
    what = f"request {request_id}" if record.request_id else record.source_instance
    mark = {"done": "[green]✓[/]", "failed": "[red]✗[/]", "given_up": "[yellow]·[/]"}.get(record.state, "…")
    line = (
        f"{mark} {escape(record.model)}: {what} from {record.source_node} to {record.node} ({record.instance_id}): {record.state}"
    )
    moved = [m for m in record.requests if m.outcome == "moved"]
    if record.over:
        line += f"; {len(moved)} of {len(record.requests)} requests moved"
        pauses = [m.pause_ms for m in moved if m.pause_ms is not None]
        if pauses:
            line += f", pause {max(pauses):.0f} ms"
        if record.duration_ms is not None:
            line += f", {record.duration_ms / 1e3:.2f} s in all"
    if record.error is not None:
        line += f"\n  {escape(record.error.message)}"
    elif record.state == "given_up":
        line += "".join(f"\n  {escape(m.reason)}" for m in record.requests if m.reason)
    return line


def concerning(records: list[MigrationRecord], request_id: str) -> list[MigrationRecord]:
    """Return the migrations of a request, the earliest first.

    Engines know the request by its attempts' names, with a number appended.
    """
    found = [r for r in records if any(is_attempt_of(m.request_id, request_id) for m in r.requests)]
    return sorted(found, key=lambda r: r.created)


def show_moves(out: Console, records: list[MigrationRecord], request_id: str) -> None:
    """Show the migrations of one request, as part of `thaw trace`."""
    for record in records:
        out.print()
        for line in migration_lines(record, request_id):
            out.print(line)
