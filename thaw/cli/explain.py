"""`thaw explain`: the last placement decision for a model."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from shared.contracts.plans import Candidate, PlanRecord
from thaw.cli.api import Api
from thaw.cli.output import Document, Json, screen, verb
from thaw.config.units import format_duration, format_size
from thaw.errors import CommandError


@verb
def explain(
    model: Annotated[str, typer.Argument(help="Name or alias of a model.", metavar="MODEL")],
    as_json: Json = False,
) -> Document:
    """Explain the last placement decision for a model: what was chosen, what was considered, and why.

    Example: [bold]thaw explain demo-250m[/]
    """
    try:
        plan = Api.find().explain(model).plan
    except CommandError as e:
        if e.code == "not_found":
            e.remedy = "A model that nobody has asked for has none yet; `thaw models list` shows those that are registered."
        raise
    out = screen(as_json)
    ago = format_duration(max(0.0, time.time() - plan.created))
    out.print(
        f"[bold]{escape(plan.model)}[/]: {plan.way.replace('_', ' ')}  [dim]{plan.plan_id}, asked by {plan.trigger}, {ago} ago[/]"
    )
    if plan.reason:
        out.print(f"  {escape(plan.reason)}")
    out.print(_outcome(plan))
    if plan.candidates:
        table = Table(box=None, header_style="dim")
        for column in ("", "NODE", "DEVICE", "WAY", "PREDICTED", "NEEDS", "FREE", "WOULD LEAVE", "NOT TAKEN BECAUSE"):
            table.add_column(column, overflow="fold")
        for candidate in plan.candidates:
            table.add_row(*_cells(candidate, chosen=candidate == plan.chosen))
        out.print(table)
    return plan.model_dump(mode="json")


def _outcome(plan: PlanRecord) -> str:
    text = f"  outcome: {plan.outcome}"
    if plan.measured_ms is not None:
        text += f" after {format_duration(plan.measured_ms / 1e3)}"
    if plan.chosen is not None and plan.chosen.predicted_ms is not None:
        text += f" [dim](predicted {format_duration(plan.chosen.predicted_ms / 1e3)})[/]"
    return text + (f"\n  [red]{escape(plan.error.message)}[/]" if plan.error else "")


def _cells(candidate: Candidate, *, chosen: bool) -> tuple[str, ...]:
    return (
        "[green]✓[/]" if chosen else "",
        candidate.node,
        ",".join(candidate.device_ids),
        candidate.way.replace("_", " "),
        "" if candidate.predicted_ms is None else format_duration(candidate.predicted_ms / 1e3),
        format_size(candidate.needed_bytes),
        format_size(candidate.free_bytes),
        escape(", ".join(candidate.victims)),
        escape(candidate.excluded or ""),
    )
