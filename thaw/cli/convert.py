"""`thaw convert`: weights into the layout that loads fastest."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from thaw.cli.output import Document, Json, screen, verb
from thaw.cli.paths import local_path
from thaw.errors import CommandError
from thaw.units import format_duration, format_size

_LABELS = {"convert": "converting", "verify": "verifying"}


@verb
def convert(
    source: Annotated[
        Path,
        typer.Argument(help="A model or LoRA adapter directory, or one .safetensors, .bin or .pt file.", metavar="SRC"),
    ],
    destination: Annotated[
        Path | None,
        typer.Argument(help="The directory to create; omit it with --verify to check a converted SRC.", metavar="[DST]"),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", min=1, max=1024, help="Number of devices to divide the weights for.", metavar="N")
    ] = 1,
    verify: Annotated[bool, typer.Option("--verify", help="Read the result again, and compare every tensor's hash.")] = False,
    as_json: Json = False,
) -> Document:
    """Convert a checkpoint into aligned, hashed partitions that load straight into memory. Pickles
    are not executed.

    Example: [bold]thaw convert ~/models/old-llama ~/models/llama --verify[/]
    """
    if destination is None and not verify:
        raise CommandError(
            "Name the directory to make.", "thaw convert SRC DST; or thaw convert DIR --verify to check one.", code="usage"
        )
    out = screen(as_json)
    arguments = [str(local_path(source))]
    if destination is not None:
        arguments += [str(local_path(destination)), "--tensor-parallel", str(tensor_parallel)]
    named = {"source": str(source), "destination": str(destination) if destination is not None else None}
    document = named | _run([*arguments, *(["--verify"] if verify else [])], out)
    what = f"{document['tensors']} tensors, {format_size(document['bytes'])}"
    cost = f"{format_duration(document['seconds'])}, {document['cpu_seconds']:.1f} CPU seconds"
    if destination is None:
        out.print(f"[green]✓[/] {escape(str(source))}: {what} are as they were converted ({cost})")
        return document
    checked = ", read back and compared" if verify else ""
    out.print(
        f"[green]✓[/] {escape(str(destination))}: {what} for {document['ranks']} rank{'s' if document['ranks'] != 1 else ''} in {cost}{checked}"
    )
    return document


def _run(arguments: list[str], out: Console) -> dict[str, Any]:
    """Run the conversion as a process, and return its report.

    The command line does not import services.
    """
    command = [sys.executable, "-m", "weights.convert", *arguments]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdout is not None
        last: dict[str, Any] = {}
        try:
            with _bar(out) as bar:
                tasks: dict[str, TaskID] = {}
                for line in child.stdout:
                    last = json.loads(line)
                    if stage := last.get("stage"):
                        task = tasks.get(stage)
                        if task is None:
                            task = tasks[stage] = bar.add_task(_LABELS[stage], total=last["total"])
                        bar.update(task, completed=last["done"], total=last["total"])
        except BaseException:
            # It removes what it has begun; waited for by the block.
            child.send_signal(signal.SIGTERM)
            raise
        status = child.wait()
        errors.seek(0)
        last_line = (errors.read().strip().splitlines() or [f"status {status}"])[-1]
    if "error" in last:
        raise CommandError(last["error"]["message"], code=last["error"]["code"])
    if "report" not in last:
        raise CommandError(f"The conversion ended early: {last_line}", "Nothing was left that looks finished; run it again.")
    report: dict[str, Any] = last["report"]
    return report


def _bar(out: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=out,
        transient=True,
        disable=out.quiet or not out.is_terminal,
    )
