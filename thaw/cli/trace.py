"""`thaw trace`: where the time to the first token went."""

from __future__ import annotations

from typing import Annotated

import typer

from thaw.cli.api import Api
from thaw.cli.migrate import concerning, show_moves
from thaw.cli.output import Document, Json, screen, verb
from thaw.cli.waterfall import load_waterfall, request_waterfall
from thaw.errors import CommandError


@verb
def trace(
    request_id: Annotated[
        str | None, typer.Argument(help="A request's id (the x-request-id of its answer); the last request by default.")
    ] = None,
    as_json: Json = False,
) -> Document:
    """Draw the waterfall of a request, and of the model load that it waited for; and how it moved between engines.

    Example: [bold]thaw trace[/]
    """
    api, out = Api.find(), screen(as_json)
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
    moves = concerning(api.migrations(limit=1000), record.ticket_id)
    show_moves(out, moves, record.ticket_id)
    return {
        "request": record.model_dump(mode="json"),
        "load": load.model_dump(mode="json") if load else None,
        "migrations": [m.model_dump(mode="json") for m in moves],
    }
