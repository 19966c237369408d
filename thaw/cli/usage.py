"""`thaw usage`: what keys and models used, and what it costs."""

from __future__ import annotations

import csv
import io
import time
from typing import Annotated, get_args

import typer
from rich.table import Table

from shared.contracts.phases import Phase
from shared.contracts.usage import Counts, Dimension, UsageSum, UsageViewed
from thaw.cli.api import Api
from thaw.cli.focus import DIMENSIONS, focus_csv, format_exact
from thaw.cli.output import Document, Json, screen, verb
from thaw.errors import CommandError
from thaw.units import parse_duration

_ABSENT = {"key": "(no key)", "model": "(no model)"}
"""Model: memory of devices without instances."""
_HOUR_S = 3600
_COLUMNS = (
    "REQUESTS",
    "FAILED",
    "PROMPT",
    "CACHED",
    "COMPLETION",
    "COMPUTE S",
    "COLD",
    "COLD S",
    "VICTIMS",
    "CLEARING S",
    "GIB H",
    "PARKED GIB H",
    "CACHED GIB H",
)


@verb
def usage(
    by: Annotated[str, typer.Option("--by", help="Dimensions of the sums: key, model, adapter, hour, day.")] = "key,model",
    since: Annotated[str, typer.Option("--since", help="How far back, in whole hours, e.g. 24h or 7d.")] = "7d",
    phases: Annotated[
        bool, typer.Option("--phases", help="Show the seconds of cold starts by phase, or add them to --csv.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV and nothing else.")] = False,
    as_focus: Annotated[
        bool, typer.Option("--focus", help="Print CSV with the columns of FOCUS, by the hour; needs prices.")
    ] = False,
    as_json: Json = False,
) -> Document:
    """Show requests, tokens, cold starts, memory held and their cost by API key and model.

    Examples:
    [bold]thaw usage --by key,hour --since 24h --csv[/]
    [bold]thaw usage --by model,day --phases[/]
    [bold]thaw usage --since 30d --focus > charges.csv[/]
    """
    if as_csv + as_focus + as_json > 1:
        raise typer.BadParameter("--csv, --focus and --json are formats: give one of them")
    if as_focus:
        by = ",".join(DIMENSIONS)
    dimensions = [part.strip() for part in by.split(",") if part.strip()]
    if unknown := [part for part in dimensions if part not in get_args(Dimension)]:
        raise typer.BadParameter(f"{unknown[0]!r} is no dimension; allowed: {', '.join(get_args(Dimension))}")
    first = int((time.time() - _seconds(since)) // _HOUR_S)
    query = {"since": str(first), "by": ",".join(dimensions)}
    viewed = UsageViewed.model_validate(Api.find().request("GET", "/admin/v1/usage", timeout=30.0, **query))
    if as_focus:
        if viewed.currency is None:
            raise CommandError("The mesh has no prices.", "Add `prices:` to thaw.yaml and restart it (docs/metering.md).")
        if not viewed.complete:
            raise CommandError("There are more rows than one answer has.", "Choose a shorter time with --since.")
        typer.echo(focus_csv(viewed.rows, viewed.currency, int(time.time() // _HOUR_S)), nl=False)
    elif as_csv:
        typer.echo(_csv(viewed, dimensions, phases), nl=False)
    else:
        out = screen(as_json)
        out.print(_phase_table(viewed, dimensions) if phases else _table(viewed, dimensions))
        if not viewed.complete:
            out.print("[yellow]there are more rows; choose fewer dimensions or a shorter time[/]")
    return viewed.model_dump(mode="json", exclude={"v", "kind"})


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as e:
        raise CommandError(f"--since {text!r} is no duration.", "Give e.g. 24h or 7d.") from e


def _value(row: UsageSum, dimension: str) -> str:
    value = getattr(row, dimension)
    if dimension == "hour":
        return time.strftime("%Y-%m-%dT%H:00Z", time.gmtime(value * _HOUR_S))
    if dimension == "day":
        return time.strftime("%Y-%m-%d", time.gmtime(value * _HOUR_S))
    return str(value or _ABSENT.get(dimension, ""))


def _table(viewed: UsageViewed, dimensions: list[str]) -> Table:
    table = Table(box=None, header_style="dim")
    for name in dimensions:
        table.add_column(name.upper())
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    if viewed.currency is not None:
        table.add_column(viewed.currency.upper(), justify="right")
    for row in viewed.rows:
        counts = row.counts
        table.add_row(
            *(_value(row, name) for name in dimensions),
            *(
                f"{count:,}"
                for count in (
                    counts.requests,
                    counts.failed,
                    counts.prompt_tokens,
                    counts.cached_tokens,
                    counts.completion_tokens,
                )
            ),
            f"{counts.compute_s:,.1f}",
            f"{counts.cold_requests:,}",
            f"{counts.cold_start_s:,.1f}",
            f"{counts.victims:,.1f}",
            f"{counts.clearing_s:,.1f}",
            f"{counts.held_gib_h:,.2f}",
            f"{counts.parked_gib_h:,.2f}",
            f"{counts.cached_gib_h:,.2f}",
            *([f"{row.cost.total:,.4f}"] if row.cost is not None else []),
        )
    return table


def _phase_table(viewed: UsageViewed, dimensions: list[str]) -> Table:
    table = Table(box=None, header_style="dim")
    found = _find_phases(viewed)
    for name in dimensions:
        table.add_column(name.upper())
    for title in ("COLD", "COLD S", *(f"{phase.upper()} S" for phase in found)):
        table.add_column(title, justify="right")
    for row in viewed.rows:
        if row.counts.cold_start_s:
            seconds = (row.counts.cold_start_s, *(row.cold_start_phases_s.get(phase, 0.0) for phase in found))
            names = (_value(row, name) for name in dimensions)
            table.add_row(*names, f"{row.counts.cold_requests:,}", *(f"{s:,.1f}" for s in seconds))
    return table


def _find_phases(viewed: UsageViewed) -> list[str]:
    """Return the phases of the rows in the order of a start."""
    found = {phase for row in viewed.rows for phase in row.cold_start_phases_s}
    known = [phase.value for phase in Phase if phase.value in found]
    return known + sorted(found - set(known))


def _csv(viewed: UsageViewed, dimensions: list[str], phases: bool) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    counts = list(Counts.model_fields)
    parts = _find_phases(viewed) if phases else []
    money = ["cost", "currency"] if viewed.currency is not None else []
    writer.writerow([*dimensions, *counts, *(f"cold_start_{phase}_s" for phase in parts), *money])
    for row in viewed.rows:
        cost = [format_exact(row.cost.total), viewed.currency] if row.cost is not None else []
        amounts = [*(getattr(row.counts, name) for name in counts), *(row.cold_start_phases_s.get(phase, 0.0) for phase in parts)]
        writer.writerow([*(_value(row, name) for name in dimensions), *amounts, *cost])
    return text.getvalue()
