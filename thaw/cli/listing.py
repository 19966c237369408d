"""Format common parts of tables: names of models, progress of parking, migrations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shared.contracts.states import FINAL

if TYPE_CHECKING:
    from shared.contracts.admin import ModelView, ParkView
    from shared.contracts.migration import MigrationRecord
    from shared.contracts.models import ModelCard


PARK_COLOURS = {"parked": "blue", "up": "green", "failed": "red", "impossible": "yellow", "waiting": "yellow"}
WORDS = {
    "queued": "waiting for its turn",
    "waiting": "waits for room",
    "starting": "is being started",
    "suspending": "is being suspended",
    "parked": "is parked",
    "up": "is up",
    "failed": "could not be parked",
    "impossible": "is not started ahead",
}


def adapters_after_bases(views: Iterable[ModelView]) -> list[ModelView]:
    return sorted(views, key=lambda v: (v.card.spec.base or v.card.spec.name, v.card.spec.base is not None, v.card.spec.name))


def shown_name(card: ModelCard) -> str:
    """Return the name that requests may also use for a LoRA adapter."""
    return card.spec.name if card.spec.base is None else f"{card.spec.base}:{card.spec.name}"


def park_line(name: str, park: ParkView) -> str:
    """Describe the progress of parking one model."""
    reason = f": {park.reason}" if park.reason else ""
    return f"[{PARK_COLOURS.get(park.state, 'dim')}]{escape(name)} {WORDS[park.state]}[/][dim]{escape(reason)}[/]"


def show_migrations(out: Console, records: Iterable[MigrationRecord]) -> None:
    """Print the migrations in progress, and the outcomes of the others."""
    going = [r for r in records if r.state not in FINAL]
    if not going:
        _show_over(out, records)
        return
    table = Table(box=None, header_style="dim")
    for column in ("MIGRATION", "MODEL", "WHAT", "FROM", "TO", "STATE", "MOVED", "ROUNDS"):
        table.add_column(column, justify="right" if column in ("MOVED", "ROUNDS") else "left")
    for r in going:
        moved = sum(m.outcome == "moved" for m in r.requests)
        table.add_row(
            f"[dim]{r.migration_id}[/]",
            escape(r.model),
            r.request_id or r.source_instance,
            r.source_node,
            r.node,
            f"[cyan]{r.state}[/]",
            f"{moved} of {len(r.requests)}",
            str(len(r.rounds)),
        )
    out.print()
    out.print(table)
    _show_over(out, records)


def summary(records: Iterable[MigrationRecord]) -> dict[str, Any]:
    """Summarise the finished migrations.

    The summary has their number by outcome, the requests that moved with their tokens, and the
    longest pause.
    """
    over = [r for r in records if r.state in FINAL]
    moved = [m for r in over for m in r.requests if m.outcome == "moved"]
    return {
        "outcomes": dict(Counter(r.state for r in over)),
        "requests": len(moved),
        "tokens": sum(m.tokens for m in moved),
        "longest_pause_ms": max((m.pause_ms for m in moved if m.pause_ms is not None), default=None),
    }


def _show_over(out: Console, records: Iterable[MigrationRecord]) -> None:
    latest = summary(records)
    if not latest["outcomes"]:
        return
    states = ", ".join(f"{n} {state.replace('_', ' ')}" for state, n in sorted(latest["outcomes"].items()))
    pause = f", the longest pause {latest['longest_pause_ms']:.0f} ms" if latest["longest_pause_ms"] is not None else ""
    out.print(
        f"\n[dim]The latest migrations: {states}; {latest['requests']} requests moved with {latest['tokens']} tokens{pause}.[/]"
    )
