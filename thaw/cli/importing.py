"""`thaw import`: configurations of other servers as a thaw.yaml."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from thaw.cli.output import Document, Json, screen, verb
from thaw.cli.paths import local_path
from thaw.config.load import faults_of
from thaw.errors import CommandError
from thaw.llama_swap import render, translate
from thaw.units import parse_size

app = typer.Typer(help="Write a thaw.yaml from the configuration of another server.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    pass


@app.command("llama-swap")
@verb
def llama_swap(
    config: Annotated[Path, typer.Argument(help="llama-swap's config.yaml.", metavar="CONFIG")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; by default standard output.", metavar="FILE")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="Device memory of one instance, for models whose files Thaw does not read.", metavar="SIZE"),
    ] = None,
    as_json: Json = False,
) -> Document:
    """Write a thaw.yaml from llama-swap's configuration, with a comment for everything that has no
    counterpart.

    Example: [bold]thaw import llama-swap config.yaml --output thaw.yaml[/]
    """
    if memory is not None:
        _check_size(memory)
    source = local_path(config)
    try:
        text, mode = source.read_text(), source.stat().st_mode & 0o666
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise CommandError(f"{config} cannot be read: {why}.", "Name the config.yaml that llama-swap uses.") from e
    draft = translate(text, str(config), os.environ, memory)
    written = render(draft, config.name)
    target = local_path(output) if output is not None else None
    faults = [fault.text(str(output or "thaw.yaml")) for fault in faults_of(written, (target or Path.cwd() / "-").parent)]
    if target is None and not as_json:
        print(written, end="")
    elif target is not None:
        _write(target, written, mode)
        out = screen(as_json)
        losses, missing = draft.all_losses(), draft.all_missing()
        out.print(f"[green]✓[/] {escape(str(output))}: {len(draft.models)} models, {len(losses)} keys without a counterpart")
        for key in missing:
            out.print(f"  [yellow]set[/] {escape(key)}")
        for fault in faults if not missing else []:
            out.print(f"  [yellow]correct[/] {escape(fault)}")
    return {
        "output": str(target) if target is not None else None,
        "yaml": written,
        "models": [model.options["name"] for model in draft.models],
        "without_counterpart": [{"path": loss.path, "reason": loss.reason} for loss in draft.all_losses()],
        "required": draft.all_missing(),
        "faults": faults,
    }


def _check_size(memory: str) -> None:
    try:
        parse_size(memory)
    except ValueError as e:
        raise CommandError(f"--memory: {e}.", "Write a size such as 8GiB.", code="usage") from None


def _write(target: Path, text: str, mode: int) -> None:
    """Write a new file.

    Args:
        mode: Permissions of the source, whose keys it has; the umask takes from them as usual.

    Raises:
        CommandError: The file exists, or cannot be written.
    """
    try:
        with open(target, "x", opener=lambda path, flags: os.open(path, flags, mode)) as file:
            file.write(text)
    except FileExistsError:
        raise CommandError(f"{target} exists.", "Name another file, or remove this one.", code="file_exists") from None
    except OSError as e:
        raise CommandError(f"{target} cannot be written: {e.strerror}.", "Name a file in a directory that you may write to.") from e
