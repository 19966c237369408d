"""The command tree of `thaw`, and its entry point."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Annotated, Any

import typer

import thaw
from thaw.cli import chat, convert, docs, doctor, explain, keys, load, logs, migrate, models, node, ps, simulate, trace, up, wake

app = typer.Typer(
    name="thaw",
    help="Many LLMs on few devices: an idle model costs no device memory, and a request wakes it.",
    epilog="Start with `thaw up --demo`; every command explains itself with --help and prints JSON with --json.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"thaw {thaw.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


app.command("up")(up.up)
app.command("down")(up.down)
app.command("ps")(ps.ps)
app.add_typer(models.app, name="models")
app.add_typer(keys.app, name="keys")
app.command("wake")(wake.wake)
app.command("sleep")(wake.sleep)
app.command("chat")(chat.chat)
app.command("trace")(trace.trace)
app.command("explain")(explain.explain)
app.command("migrate")(migrate.migrate)
app.command("logs")(logs.logs)
app.command("convert")(convert.convert)
app.command("load")(load.load)
app.command("simulate")(simulate.simulate)
app.add_typer(node.app, name="node")
app.command("doctor")(doctor.doctor)
app.add_typer(docs.app, name="docs", hidden=True)


def _asks_json(arguments: list[str]) -> bool:
    """Whether one JSON document is to be printed, as far as that can be seen before the arguments are understood."""
    if arguments[:1] == ["simulate"]:  # its --json takes a path
        return "--json=-" in arguments or ("--json", "-") in pairwise(arguments)
    return "--json" in arguments


def main(arguments: list[str] | None = None) -> int:
    """Run `thaw`; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    as_json = _asks_json(arguments)
    try:
        # Without the library's own handling, bad usage can be told in JSON too.
        status: Any = app(arguments, standalone_mode=not as_json)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1
    except typer.Abort:
        return 130
    except Exception as e:
        format_message, code = getattr(e, "format_message", None), getattr(e, "exit_code", None)
        if not as_json or format_message is None or not isinstance(code, int):
            raise
        print(json.dumps({"error": {"code": "usage", "message": format_message(), "remedy": "See --help."}}))
        return code
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
