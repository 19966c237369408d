"""`thaw trace`: where the time to the first token went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from shared.contracts.migration import MigrationRecord
from shared.contracts.traces import RequestTrace
from thaw.cli.api import Api
from thaw.cli.handovers import handovers_chart
from thaw.cli.migrate import concerning, show_moves
from thaw.cli.output import Document, Json, screen, verb
from thaw.cli.paths import replaced_file
from thaw.cli.waterfall import load_waterfall, request_waterfall
from thaw.errors import CommandError


def _migrations(api: Api, request: RequestTrace) -> list[MigrationRecord]:
    """Return the latest migrations, and those that moved the request.

    The result is empty while no scheduler leads, because the trace can be shown without them.
    """
    try:
        found = {m.migration_id: m for m in api.migrations()}
        for named in {h.migration_id for h in request.handovers} - found.keys() - {None}:
            found |= {m.migration_id: m for m in api.migrations(migration_id=named)}
        return list(found.values())
    except CommandError as e:
        if e.code not in ("unreachable", "unavailable", "deadline_exceeded"):
            raise
        return []


@verb
def trace(
    request_id: Annotated[
        str | None,
        typer.Argument(help="A request's id (the x-request-id of its answer); the last request by default.", metavar="REQUEST"),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(help="Write all kept traces, one JSON object per line, for thaw simulate.", metavar="FILE"),
    ] = None,
    as_json: Json = False,
) -> Document:
    """Draw the phases of a request's time to the first token, its model's load and its hand-offs.

    Example: [bold]thaw trace[/]
    """
    api, out = Api.find(), screen(as_json)
    if export is not None:
        return _export(api, out, request_id, export)
    record = api.trace(request_id)
    out.print(request_waterfall(record, out))
    load = None
    if record.load_plan_id is not None:
        try:
            load = api.load_trace(record.load_plan_id)
        except CommandError as e:
            if e.code not in ("not_found", "404"):
                raise
    if load is not None:
        out.print()
        out.print(load_waterfall(load, out))
    if (chart := handovers_chart(record, out)) is not None:
        out.print()
        out.print(chart)
    moves = concerning(_migrations(api, record), record.ticket_id)
    show_moves(out, moves, record.ticket_id)
    return {
        "request": record.model_dump(mode="json"),
        "load": load.model_dump(mode="json") if load else None,
        "migrations": [m.model_dump(mode="json") for m in moves],
    }


def _export(api: Api, out: Console, request_id: str | None, path: Path) -> Document:
    if request_id is not None:
        raise CommandError("--export writes all traces; it takes no request.")
    try:
        with replaced_file(path) as file:
            count = 0
            for record in api.traces():
                file.write(f"{record.model_dump_json()}\n".encode())
                count += 1
    except OSError as e:
        raise CommandError(f"{path} cannot be written: {e.strerror}") from e
    shown = escape(str(path))
    out.print(f"{count} requests in {shown}. Replay them: [bold]thaw simulate --workload trace --trace {shown} ...[/]")
    return {"requests": count, "path": str(path)}
