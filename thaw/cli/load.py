"""`thaw load`: how fast this machine loads a checkpoint, without a mesh."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from thaw.cli.output import Document, Json, screen, verb
from thaw.cli.paths import local_path
from thaw.errors import CommandError
from thaw.units import format_duration, format_size


class Tier(StrEnum):
    DRAM = "dram"


@verb
def load(
    path: Annotated[
        str,
        typer.Argument(
            help="A model directory in Hugging Face layout, one .safetensors file, or a model's URL (https, s3, gs, az, hf).",
            metavar="PATH",
        ),
    ],
    tier: Annotated[Tier, typer.Option(help="Where the weights go: dram, the host's shared memory.")] = Tier.DRAM,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads that read: connections, of a URL.")] = 4,
    ready: Annotated[bool, typer.Option("--ready", help="Populate the memory beforehand, as the loader's pool has it.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with the hashes of a converted checkpoint.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Show the bandwidth of each stage too.")] = False,
    as_json: Json = False,
) -> Document:
    """Time one load of a checkpoint into memory, and free the memory.

    Files in the page cache are copied from there; bytes from a URL are not kept on the disk.

    Example: [bold]thaw load ~/models/llama --tier dram --report[/]
    """
    out = screen(as_json)
    with out.status(escape(f"loading {path}")):
        document = _load(path if "://" in path else str(local_path(path)), threads, ready, verify)
    out.print(
        f"[green]✓[/] {format_size(document['bytes'])} in {format_duration(document['seconds'])}: "
        f"[bold]{_rate(document['gb_per_s'])}[/], {document['cpu_seconds']:.2f} CPU seconds"
    )
    if report:
        out.print(_stages(document))
    return document


def _load(path: str, threads: int, ready: bool, verify: bool) -> dict[str, Any]:
    """Run the load as a process, and return the loader's report.

    The command line does not import services.
    """
    command = [sys.executable, "-m", "weights.load", path, "--threads", str(threads)]
    command += [option for option, wanted in (("--ready", ready), ("--verify", verify)) if wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except ValueError as e:
        if done.returncode == -signal.SIGKILL:
            raise CommandError(
                "The load was killed, most likely by the kernel for want of memory.",
                "See `dmesg`; free memory or use a smaller model.",
            ) from e
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise CommandError(f"The load failed: {last}", "Try fewer --threads, and see `thaw doctor`.") from e
    if "error" in document:
        raise CommandError(document["error"]["message"], code=document["error"]["code"])
    return document


def _stages(document: dict[str, Any]) -> Table:
    """Format stages in wall time, and below them the reading threads' steps.

    The steps are in the time of all threads together.
    """
    table = Table("stage", "time", "bytes", "bandwidth")
    for stage in document["stages"]:
        size = format_size(document["bytes"]) if stage.get("gb_per_s") else ""
        table.add_row(stage["stage"], format_duration(stage["seconds"]), size, _rate(stage.get("gb_per_s")))
    for step in document["steps"]:
        if step["bytes"]:
            label = f"  {step['step']} ({document['threads']} threads)"
            table.add_row(label, format_duration(step["thread_seconds"]), format_size(step["bytes"]), _rate(step["gb_per_s"]))
    return table


def _rate(gb_per_s: float | None) -> str:
    return "" if gb_per_s is None else f"{gb_per_s:.2f} GB/s"
