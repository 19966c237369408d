"""The common parts of all verbs: `--json`, errors with their remedy, exit statuses.

A verb prints to `screen(json)`, which is mute with `--json`, and returns its document, which is
printed only with `--json`. Status 0: done; 1: failed (`CommandError`, or a document whose "ok" is
False); 2: bad usage.
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape

from thaw.cli.paths import program
from thaw.errors import CommandError

P = ParamSpec("P")
Document = dict[str, Any]
STDOUT = Path("-")
"""The value of `thaw simulate --json`, an option without a value in other verbs."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
_errors = Console(stderr=True, highlight=False, soft_wrap=True)


class _MuteConsole(Console):
    """A console without output. With `quiet` alone rich renders everything, and then drops it."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print nothing."""


def screen(as_json: bool) -> Console:
    """Return the console for people; it is mute with `--json`."""
    # Output that is no terminal (a pipe, a log of CI) has no width: tables get the width that they
    # need.
    kind = _MuteConsole if as_json else Console
    return kind(quiet=as_json, highlight=False, width=None if sys.stdout.isatty() else 140)


def show_error(error: CommandError, as_json: bool) -> None:
    if as_json:
        print(json.dumps(error.body()))
        return
    _errors.print(f"[bold red]✗ {escape(qualify_commands(error.what))}[/]")
    for line in error.lines():
        _errors.print(f"  {escape(qualify_commands(line))}")
    if error.remedy:
        _errors.print(f"  {escape(qualify_commands(error.remedy))}")


def show_warning(text: str) -> None:
    """Print a line for people to the standard error stream."""
    _errors.print(f"[yellow]{escape(qualify_commands(text))}[/]")


def qualify_commands(text: str) -> str:
    """Return `text` with its `thaw …` commands as they run in this shell."""
    return text.replace("`thaw ", f"`{program()} ")


def verb(function: Callable[P, Document | None]) -> Callable[P, None]:
    """Make a function into a command.

    The command prints the function's document with `--json`, prints its `CommandError`, and exits
    with the right status.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = kwargs.get("as_json") in (True, STDOUT)
        try:
            document = function(*args, **kwargs)
        except CommandError as e:
            show_error(e, as_json)
            raise typer.Exit(1) from e
        except ValueError as e:
            if (error := _describe_invalid(e)) is None:
                raise
            show_error(error, as_json)
            raise typer.Exit(1) from e
        except BrokenPipeError:  # the reader of the output has ended, which is no fault of a file
            raise
        except OSError as e:
            show_error(_describe_os_error(e), as_json)
            raise typer.Exit(1) from e
        except KeyboardInterrupt:
            show_error(CommandError("Interrupted.", code="interrupted"), as_json)
            raise typer.Exit(130) from None
        if as_json and document is not None:
            print(json.dumps(document, default=str))
            sys.stdout.flush()
        if document is not None and document.get("ok") is False:
            raise typer.Exit(1)

    run.__doc__ = help_of(inspect.getdoc(function) or "")
    return run


def _describe_os_error(error: OSError) -> CommandError:
    """Return the error for a file or a connection that could not be used."""
    why = error.strerror or str(error) or type(error).__name__
    what = f"{error.filename}: {why}." if error.filename else f"{why}."
    remedy = "Free some disk space." if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Correct the path, or its permissions."
    return CommandError(what, remedy if error.errno else "", code="io_error")


def _describe_invalid(error: ValueError) -> CommandError | None:
    """Return the error for values that a message does not accept; None: it is another one.

    pydantic's class is not compared: importing it takes longer than most commands.
    """
    list_faults = getattr(error, "errors", None)
    if list_faults is None:
        return None
    faults = "; ".join(f"{'.'.join(map(str, f['loc'])) or getattr(error, 'title', '')}: {f['msg']}" for f in list_faults())
    return CommandError(f"A value is not valid: {faults}.", "--help shows the values that are allowed.", code="invalid_request")


def help_of(docstring: str) -> str:
    """Return a command's help: paragraphs without line breaks, and examples on lines of their own.

    typer keeps a docstring's line breaks, which are too wide for a terminal of 80 columns.
    """
    paragraphs = docstring.split("\n\n")
    return "\n\n".join(p if p.startswith("Example") else " ".join(p.split()) for p in paragraphs)
