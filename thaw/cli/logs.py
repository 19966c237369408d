"""`thaw logs`: what a process of this machine's mesh wrote."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from thaw.cli.output import Document, Json, screen, verb
from thaw.errors import CommandError
from thaw.launcher.home import Home
from thaw.launcher.logfiles import tail

_POLL_S = 0.2
_LEVELS = {"error": "red", "critical": "red", "warning": "yellow", "debug": "dim"}
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\\\)|[\x00-\x08\x0b-\x1f\x7f]")
"""ANSI sequences and control characters, which a service's libraries write and a terminal would
obey.
"""
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

    Example: [bold]thaw logs nodeagent -f[/]
    """
    if follow and as_json:
        raise typer.BadParameter("--follow never ends, --json is one document: give one of them")
    files = log_files(Home.from_environment(), service)
    out = screen(as_json)
    found = {name: tail(path, lines) for name, path in files.items()}
    for name, written in found.items():
        for line in written:
            out.print(_format_line(line, name if len(files) > 1 else ""), soft_wrap=True)
    if follow:
        _follow(out, files)
        return None
    return {"logs": {name: [_parse_line(line) for line in written] for name, written in found.items()}}


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


def _follow(out: Console, files: dict[str, Path]) -> None:
    positions = {name: path.stat().st_size for name, path in files.items()}
    rest = dict.fromkeys(files, "")
    try:
        while True:
            for name, path in files.items():
                for line in _new_lines(name, path, positions, rest):
                    out.print(_format_line(line, name if len(files) > 1 else ""), soft_wrap=True)
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        return


def _new_lines(name: str, path: Path, positions: dict[str, int], rest: dict[str, str]) -> Iterator[str]:
    try:
        with path.open("rb") as f:
            if f.seek(0, 2) < positions[name]:  # moved aside for its size
                positions[name] = 0
            f.seek(positions[name])
            data = f.read()
    except FileNotFoundError:  # an engine's, of which only so many are kept
        return
    positions[name] += len(data)
    *complete, rest[name] = (rest[name] + data.decode(errors="replace")).split("\n")
    yield from complete


def _parse_line(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return {"message": line}


def _format_line(line: str, name: str) -> Text:
    """A JSON log line for people; any other line as it is."""
    line = _CONTROL.sub("", line)
    entry = _parse_line(line)
    if not isinstance(entry, dict) or "time" not in entry:
        return Text(f"{name} {line}" if name else line)
    level = str(entry.get("level", ""))
    text = Text.assemble((f"{entry['time'][11:23]} ", "dim"), (f"{name} ", "dim") if name else "")
    text.append(f"{level:7} ", _LEVELS.get(level, ""))
    text.append(_CONTROL.sub("", str(entry.get("message", ""))))
    extras = _CONTROL.sub("", " ".join(f"{k}={v}" for k, v in entry.items() if k not in _SHOWN and v is not None))
    if extras:
        text.append(f" {extras}", "dim")
    if entry.get("exception"):
        text.append(f"\n{entry['exception']}", "dim")
    return text
