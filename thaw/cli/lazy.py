"""Import commands when they run.

`thaw --help` needs their names and one line of each, not the modules behind them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True)
class Entry:
    """One command, or group of commands, of the command line.

    Attributes:
        name: The command's name on the command line.
        module: Module of `thaw.cli` that has it.
        attribute: The function of a command, or the `Typer` of a group.
        help: First line of its own help.
    """

    name: str
    module: str
    attribute: str
    help: str
    hidden: bool = False

    def load(self) -> Any:
        """Import the module and return the command."""
        found = getattr(importlib.import_module(f"thaw.cli.{self.module}"), self.attribute)
        holder = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False)
        holder.callback()(_do_nothing)
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=self.name, hidden=self.hidden)
        else:
            holder.command(self.name, hidden=self.hidden)(found)
        group = typer.main.get_command(holder)
        assert isinstance(group, TyperGroup)
        return group.commands[self.name]


def _do_nothing() -> None:
    """Makes a holder of one command a group."""


def group_of(entries: tuple[Entry, ...]) -> type[TyperGroup]:
    """Return the class of a group whose commands are `entries`."""
    by_name = {e.name: e for e in entries}

    class LazyGroup(TyperGroup):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.commands.update({e.name: TyperCommand(e.name, help=e.help, hidden=e.hidden) for e in entries})

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            """Find the command as usual, suggestions included, then import it."""
            name, _, rest = super().resolve_command(ctx, args)
            return name, by_name[name].load() if name in by_name else None, rest

    return LazyGroup
