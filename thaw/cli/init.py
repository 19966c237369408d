"""`thaw init`: a thaw.yaml with this machine's devices, and comments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from thaw.cli.output import Document, Json, screen, verb
from thaw.cli.paths import local_path, program
from thaw.errors import CommandError
from thaw.launcher.gpus import Gpu, NvmlFailed, read_gpus
from thaw.launcher.planning import DEFAULT_PORT, MEMORY_SHARE
from thaw.launcher.preflight import available_memory
from thaw.units import format_size

_GIB, _MIB = 2**30, 2**20
_GPU_SHARE = "90%"


def find_gpus() -> tuple[Gpu, ...]:
    """Return the machine's NVIDIA GPUs; none without nvidia-ml-py or where NVML fails."""
    try:
        return read_gpus().devices
    except (ImportError, NvmlFailed):
        return ()


def compose_file(gpus: tuple[Gpu, ...], memory_bytes: int, port: int, models: dict[str, str]) -> str:
    """Return the text of a thaw.yaml.

    Args:
        memory_bytes: Available memory of the host. The cpu device gets a part of it where there is
            no GPU.
        models: Sources by name.
    """
    budget = _round_size(int(memory_bytes * MEMORY_SHARE))
    on_cpu = f"      cpu:0: {budget}            # 70% of the {format_size(memory_bytes)} that were available"
    if gpus:
        devices = [f"      {g.device_id}: {_GPU_SHARE}          # of {format_size(g.total_bytes)}: {g.name}" for g in gpus]
        devices.append(f"      # cpu:0: {budget}        # a share of host memory as a device for small models")
    else:
        devices = [on_cpu]
    entries = [f"  - {{name: {name}, source: {source}}}" for name, source in models.items()]
    example = "  # - {name: qwen3, source: hf://Qwen/Qwen3-0.6B}    # or a directory in Hugging Face layout, https://…, s3://…"
    return "\n".join(
        [
            "# thaw.yaml, written by `thaw init` for this machine. Start it: thaw up --config thaw.yaml",
            "# After a change run the same again: only the difference is applied. All keys: docs/configuration.md",
            "",
            "mesh:",
            "  host: 127.0.0.1          # 0.0.0.0 to be reached from elsewhere: add keys first (thaw keys add NAME)",
            f"  port: {port}",
            "  nodes:",
            "    node-0:",
            *devices,
            "",
            "defaults:",
            "  keep_alive: 5m           # an idle model stays on its device so long; -1: until something else needs the room",
            "",
            "models:" if entries else "models: []",
            *entries,
            example,
            "",
        ]
    )


def _round_size(nbytes: int) -> str:
    return f"{nbytes // _GIB}GiB" if nbytes >= 4 * _GIB else f"{max(1, nbytes // _MIB)}MiB"


def _parse_models(pairs: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, separator, source = pair.partition("=")
        if not (name and separator and source):
            raise CommandError(f"--model {pair} is not understood.", "Write --model NAME=SOURCE.", code="usage")
        found[name] = source
    return found


@verb
def init(
    output: Annotated[Path, typer.Argument(help="The file to write.", metavar="FILE")] = Path("thaw.yaml"),
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the endpoint (8080).")] = None,
    model: Annotated[list[str] | None, typer.Option("--model", help="A model as NAME=SOURCE; may be repeated.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take what is found and the defaults.")] = False,
    as_json: Json = False,
) -> Document:
    """Write a commented thaw.yaml with this machine's devices and memory.

    Example: [bold]thaw init --model qwen3=hf://Qwen/Qwen3-0.6B[/]
    """
    out, target = screen(as_json), local_path(output)
    if target.exists():
        raise CommandError(f"{target} exists.", "Name another file, or remove this one.", code="file_exists")
    models, gpus, memory_bytes = _parse_models(model or []), find_gpus(), available_memory()
    found = ", ".join(f"{g.device_id} ({g.name})" for g in gpus) or f"no NVIDIA GPU, and {format_size(memory_bytes)} of memory"
    out.print(f"found: {escape(found)}")
    if not (yes or as_json) and sys.stdin.isatty():
        port = port or int(typer.prompt("Port of the endpoint", default=DEFAULT_PORT, type=int))
        if not models and (source := typer.prompt("Source of a first model (empty: none)", default="", show_default=False)):
            models[str(typer.prompt("Its name"))] = source
    text = compose_file(gpus, memory_bytes, port or DEFAULT_PORT, models)
    try:
        with target.open("x") as file:
            file.write(text)
    except OSError as e:
        raise CommandError(f"{target} cannot be written: {e.strerror}.", "Name a file in a directory that you may write to.") from e
    out.print(f"[green]✓[/] {escape(str(output))}. Start it: [bold]{program()} up --config {escape(str(output))}[/]")
    return {"output": str(target), "devices": [g.device_id for g in gpus] or ["cpu:0"], "models": list(models), "yaml": text}
