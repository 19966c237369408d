"""`thaw service install|show|remove`: the mesh of this machine as a systemd unit."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from thaw.cli.output import Document, Json, screen, verb
from thaw.cli.paths import local_path
from thaw.config import load_config
from thaw.errors import CommandError
from thaw.launcher.home import Home, write_private
from thaw.launcher.systemd import Systemd

app = typer.Typer(help="The mesh as a systemd unit: install, show, remove.", no_args_is_help=True)
UNIT = "thaw.service"
_MARK = "# Written by `thaw service install`."
_STOP_S = 120
"""Seconds that the mesh may take to stop: gateways let active requests finish."""

Config = Annotated[Path | None, typer.Option("--config", help="The thaw.yaml that the unit starts.")]
System = Annotated[bool, typer.Option("--system", help="A unit of the system, started at boot (as root), not of this user.")]


def compose_unit(command: list[str], home: Path, *, is_system: bool, variables: Path | None = None) -> str:
    """Return the unit that runs `thaw up`.

    systemd signals the supervisor alone, which stops everything else; it kills what is left. The
    delegated control group lets the nodeagent freeze engines.

    Args:
        command: Start of the mesh in the foreground.
        home: The state directory.
        is_system: It is a unit of the system, not of this user.
        variables: A file with more environment variables (`format_variables`).
    """
    return "\n".join(
        [
            _MARK,
            "[Unit]",
            "Description=Thaw: serverless LLM serving",
            *(["After=network-online.target", "Wants=network-online.target"] if is_system else []),
            "",
            "[Service]",
            "Type=exec",
            f"ExecStart={' '.join(map(_quote, command))}",
            f"Environment={_quote(f'THAW_HOME={home}', is_command=False)}",
            *([] if variables is None else [f"EnvironmentFile={_escape_pattern(variables)}"]),
            f"WorkingDirectory={str(home.parent).replace('%', '%%')}",
            "KillMode=mixed",
            f"TimeoutStopSec={_STOP_S}",
            "Restart=on-failure",
            "RestartSec=5",
            "Delegate=yes",
            "LimitNOFILE=65536",
            "",
            "[Install]",
            f"WantedBy={'multi-user.target' if is_system else 'default.target'}",
            "",
        ]
    )


def _quote(word: str, *, is_command: bool = True) -> str:
    """Quote a word of a unit file, in which % has a meaning, and $ in commands."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    escaped = escaped.replace("$", "$$") if is_command else escaped
    return f'"{escaped}"' if any(c.isspace() or c in "\"'\\;" for c in word) else escaped


def _escape_pattern(path: Path) -> str:
    """Return a path for EnvironmentFile=, which takes it as a pattern, and has no quotes."""
    return re.sub(r"([*?\[\\])", r"\\\1", str(path)).replace("%", "%%")


def format_variables(names: Iterable[str]) -> str:
    """Return lines for EnvironmentFile= with the present values of environment variables."""
    return "".join(f'{name}="{_escape_value(os.environ[name])}"\n' for name in sorted(names))


def _escape_value(value: str) -> str:
    return re.sub(r'(["\\`$])', r"\\\1", value)


def _unit(config: Path | None, home: Home, *, is_system: bool) -> tuple[str, str]:
    """Return the unit, and the text of its file of variables.

    The text is empty if the thaw.yaml names no variables. systemd passes none of this shell, so
    the unit reads those that the file names.

    Raises:
        CommandError: The unit could not start, because the thaw.yaml is missing or has a fault.
    """
    command, variables = [sys.executable, "-m", "thaw", "up"], ""
    if config is not None:
        path = local_path(config).absolute()
        if not path.is_file():
            raise CommandError(f"{path} is not a file.", "Name the thaw.yaml to start; `thaw init` writes one.", code="not_found")
        variables = format_variables(load_config(path).variables)
        command += ["--config", str(path)]
    file = home.service_variables_file if variables else None
    return compose_unit(command, home.root, is_system=is_system, variables=file), variables


def _directory(*, is_system: bool) -> Path:
    if is_system:
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"


@app.command()
@verb
def show(config: Config = None, system: System = False, as_json: Json = False) -> Document:
    """Print the systemd unit.

    Example: [bold]thaw service show --config thaw.yaml[/]
    """
    text, _ = _unit(config, Home.from_environment(), is_system=system)
    if not as_json:
        print(text, end="")
    return {"unit": text}


@app.command()
@verb
def install(config: Config = None, system: System = False, as_json: Json = False) -> Document:
    """Write the systemd unit, and print the commands that start it.

    A thaw.yaml is checked first. The unit gets the present values of the variables that it names,
    from a private file in the state directory; install the unit again if they change.

    Example: [bold]thaw service install --config thaw.yaml[/]
    """
    out, target, home = screen(as_json), _directory(is_system=system) / UNIT, Home.from_environment()
    text, variables = _unit(config, home, is_system=system)
    if target.is_symlink() or target.exists():
        _check_written_here(target)
    _keep_variables(home, variables)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    except OSError as e:
        raise CommandError(f"{target} cannot be written: {e.strerror}.", "Run it as root for a unit of the system.") from e
    control = Systemd(is_system=system).command
    commands = [f"{control} daemon-reload", f"{control} enable --now {UNIT}"]
    if not system:
        commands.append("loginctl enable-linger    # to start it at boot, without a login")
    if variables:
        out.print(f"[green]✓[/] {escape(str(home.service_variables_file))}, with the variables that {escape(str(config))} names")
    out.print(f"[green]✓[/] {escape(str(target))}. Start it:")
    for command in commands:
        out.print(f"  [bold]{escape(command)}[/]")
    return {"path": str(target), "unit": text, "commands": commands}


@app.command()
@verb
def remove(system: System = False, as_json: Json = False) -> Document:
    """Stop and disable the systemd unit, and remove its file.

    Only a file that `thaw service install` has written is removed, with its variables. The state
    directory stays.

    Example: [bold]thaw service remove[/]
    """
    out, target, systemd = screen(as_json), _directory(is_system=system) / UNIT, Systemd(is_system=system)
    document: Document = {"path": str(target), "removed": False, "stopped": False, "disabled": False}
    if not (target.is_symlink() or target.exists()):
        out.print(f"There is no {escape(str(target))}: nothing to remove.")
        return document
    _check_written_here(target)
    if systemd.is_reachable():
        document["stopped"] = systemd.is_active(UNIT)
        systemd.disable(UNIT, _STOP_S)
        document["disabled"] = True
    try:
        if not document["disabled"]:
            document["disabled"] = _remove_links(target)
        target.unlink()
        Home.from_environment().service_variables_file.unlink(missing_ok=True)
    except OSError as e:
        raise CommandError(f"{target} cannot be removed: {e.strerror}.", "Run it as root for a unit of the system.") from e
    document["removed"] = True
    if systemd.is_reachable():
        systemd.forget(UNIT)
    else:
        out.print("[yellow]![/] systemd does not answer, so the unit was not stopped. `thaw down` stops a mesh that still runs.")
    done = [word for word in ("stopped", "disabled", "removed") if document[word]]
    out.print(f"[green]✓[/] {UNIT}: {', '.join(done)}. It was {escape(str(target))}.")
    return document


def _keep_variables(home: Home, text: str) -> None:
    """Write the unit's file of variables, or remove that of an earlier unit without `text`."""
    if text:
        home.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(home.service_variables_file, text)
    else:
        home.service_variables_file.unlink(missing_ok=True)


def _check_written_here(target: Path) -> None:
    """Raise `CommandError` if the unit's file is not the work of `thaw service install`."""
    try:
        is_ours = not target.is_symlink() and target.read_text(errors="replace").startswith(_MARK)
    except OSError as e:
        raise CommandError(f"{target} cannot be read: {e.strerror}.", "Run it as root for a unit of the system.") from e
    if not is_ours:
        raise CommandError(
            f"{target} was not written by `thaw service install`, so it stays as it is.",
            "Remove it yourself if it is not needed.",
            code="conflict",
        )


def _remove_links(target: Path) -> bool:
    """Remove the links that start the unit at boot or login, as `systemctl disable` does.

    Returns:
        Whether there were any.
    """
    links = [link for link in target.parent.glob(f"*.wants/{UNIT}") if link.is_symlink()]
    for link in links:
        link.unlink()
    return bool(links)
