"""`thaw logs`: the logs of this machine's mesh, or of the nodes behind a gateway."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from shared.contracts.logs import MAX_LINES
from shared.logfiles import strip_control
from thaw.cli.api import Api
from thaw.cli.output import Document, Json, screen, show_warning, verb
from thaw.cli.remote_logs import find_remote
from thaw.errors import CommandError
from thaw.launcher.home import Home
from thaw.launcher.logfiles import tail, tail_with_end
from thaw.launcher.status import running_status

_POLL_S = 0.2
_REMOTE_POLL_S = 1.0
_LEVELS = {"error": "red", "critical": "red", "warning": "yellow", "debug": "dim"}
_SHOWN = {"time", "level", "message", "service", "logger", "exception", "color_message"}


@verb
def logs(
    service: Annotated[
        str,
        typer.Argument(
            help="gateway, scheduler, migrator, nodeagent, loader, nats, postgres, supervisor, engine, zygote, or the id of an instance.",
            metavar="SERVICE",
        ),
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log as it grows.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Number of last lines.")] = 50,
    as_json: Json = False,
) -> Document | None:
    """Show the log of a service, or of an engine by its instance's id.

    If THAW_URL names the gateway of another mesh: a log of its nodes, with the admin key.

    Example: [bold]thaw logs nodeagent -f[/]
    """
    if follow and as_json:
        raise typer.BadParameter("--follow never ends, --json is one document: give one of them")
    home = Home.from_environment()
    out = screen(as_json)
    if os.environ.get("THAW_URL") and running_status(home) is None:
        found = _show_remote(out, Api.find(home), service, lines, follow)
    else:
        found = _show_local(out, log_files(home, service), lines, follow)
    return None if follow else {"logs": {name: [_parse_line(line) for line in written] for name, written in found.items()}}


def _show_local(out: Console, files: dict[str, Path], lines: int, follow: bool) -> dict[str, list[str]]:
    if not follow:
        found = {name: tail(path, lines) for name, path in files.items()}
        _print(out, found)
    else:
        ends = {name: tail_with_end(path, lines) for name, path in files.items()}
        found = {name: last for name, (last, _) in ends.items()}
        _print(out, found)
        positions = {name: end for name, (_, end) in ends.items()}
        rest = dict.fromkeys(files, b"")
        _follow(lambda: _print(out, {name: list(_new_lines(name, path, positions, rest)) for name, path in files.items()}), _POLL_S)
    return found


def _show_remote(out: Console, api: Api, service: str, lines: int, follow: bool) -> dict[str, list[str]]:
    logs = find_remote(api, service)
    found = {title: list(log.read(api, min(lines, MAX_LINES))) for title, log in logs.items()}
    _print(out, found)
    if follow:

        def print_new() -> None:
            new: dict[str, list[str]] = {title: [] for title in logs}
            try:
                for title, log in logs.items():
                    new[title] = log.follow(api, MAX_LINES, show_warning)
            finally:  # of the logs that were read before one ended the command
                _print(out, new)

        _follow(print_new, _REMOTE_POLL_S)
    return found


def _print(out: Console, found: Mapping[str, Iterable[str]]) -> None:
    for name, written in found.items():
        for line in written:
            out.print(_format_line(line, name if len(found) > 1 else ""), soft_wrap=True)


def _follow(print_new: Callable[[], None], poll_s: float) -> None:
    try:
        while True:
            print_new()
            time.sleep(poll_s)
    except KeyboardInterrupt:
        return


def log_files(home: Home, service: str) -> dict[str, Path]:
    """Return log files by name.

    They are those of the named service's processes on every node, or of engines and their zygote.
    """
    known = {p.name.removesuffix(".log"): p for p in sorted(home.logs.glob("*.log"))}
    found = {n: p for n, p in known.items() if n == service or n.startswith(f"{service}.")}
    if not found and len(service) >= 4:
        found = {p.name.removesuffix(".log"): p for p in sorted(home.nodes.glob(f"*/logs/*{_literal(service)}*.log"))}
    if not found:
        raise CommandError(
            f"There is no log of {service!r} under {home.root}.",
            f"Logs: {', '.join(known) or 'none; the mesh has never run here'}.",
            code="not_found",
        )
    return found


def _literal(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text if c != "/")


def _new_lines(name: str, path: Path, positions: dict[str, int], rest: dict[str, bytes]) -> Iterator[str]:
    """Yield the lines that have ended since the last call.

    `rest` keeps bytes: a read can end inside a character.
    """
    try:
        with path.open("rb") as f:
            if f.seek(0, 2) < positions[name]:  # moved aside for its size
                positions[name], rest[name] = 0, b""
            f.seek(positions[name])
            data = f.read()
    except FileNotFoundError:  # an engine's, of which only so many are kept
        return
    positions[name] += len(data)
    *complete, rest[name] = (rest[name] + data).split(b"\n")
    yield from (line.decode(errors="replace") for line in complete)


def _parse_line(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return {"message": line}


def _format_line(line: str, name: str) -> Text:
    """A JSON log line for people; any other line as it is."""
    line = strip_control(line)
    entry = _parse_line(line)
    if not isinstance(entry, dict) or not isinstance(entry.get("time"), str):  # an engine's may have another form
        return Text(f"{name} {line}" if name else line)
    level, at = strip_control(str(entry.get("level", ""))), strip_control(entry["time"][11:23])
    text = Text.assemble((f"{at} ", "dim"), (f"{name} ", "dim") if name else "")
    text.append(f"{level:7} ", _LEVELS.get(level, ""))
    text.append(strip_control(str(entry.get("message", ""))))
    extras = strip_control(" ".join(f"{k}={v}" for k, v in entry.items() if k not in _SHOWN and v is not None))
    if extras:
        text.append(f" {extras}", "dim")
    if entry.get("exception"):
        text.append(strip_control(f"\n{entry['exception']}"), "dim")
    return text
