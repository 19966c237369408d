"""`thaw init`: a thaw.yaml with this machine's devices, and comments."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.markup import escape

from thaw.cli.output import Document, Json, screen, verb
from thaw.cli.paths import local_path, program
from thaw.errors import CommandError
from thaw.launcher.gpus import Gpu, NvmlFailed, read_gpus
from thaw.launcher.planning import DEFAULT_PORT, MEMORY_SHARE
from thaw.launcher.preflight import available_memory
from thaw.units import format_size, parse_size

_GIB, _MIB = 2**30, 2**20
GPU_SHARE = "90%"
CPU = "cpu:0"


def find_gpus() -> tuple[Gpu, ...]:
    """Return the machine's NVIDIA GPUs; none without nvidia-ml-py or where NVML fails."""
    try:
        return read_gpus().devices
    except (ImportError, NvmlFailed):
        return ()


def compose_file(
    gpus: tuple[Gpu, ...], memory_bytes: int, port: int, models: dict[str, str], budgets: Mapping[str, str] | None = None
) -> str:
    """Return the text of a thaw.yaml.

    Args:
        memory_bytes: Available memory of the host. The cpu device gets a part of it where there is
            no GPU.
        models: Sources by name.
        budgets: Memory for models by device, in place of what is proposed; "0": the device is not
            used.
    """
    chosen = budgets or {}
    budget = _round_size(int(memory_bytes * MEMORY_SHARE))
    devices = []
    for g in gpus:
        line = f"{g.device_id}: {chosen.get(g.device_id, GPU_SHARE)}          # of {format_size(g.total_bytes)}: {g.name}"
        devices.append(f"      # {line}" if chosen.get(g.device_id) == "0" else f"      {line}")
    if gpus and CPU not in chosen:
        devices.append(f"      # {CPU}: {budget}        # a share of host memory as a device for small models")
    else:
        available = f"of the {format_size(memory_bytes)} that were available"
        devices.append(f"      {CPU}: {chosen.get(CPU, budget)}            # {available}")
    entries = [f"  - {{name: {_as_yaml(name)}, source: {_as_yaml(source)}}}" for name, source in models.items()]
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


def _as_yaml(text: str) -> str:
    """Return text as a scalar of a mapping in braces, quoted if a character has a meaning there."""
    try:
        is_plain = yaml.safe_load(f"{{key: {text}}}") == {"key": text}
    except yaml.YAMLError:
        is_plain = False
    return text if is_plain else json.dumps(text)


def _ask_budgets(gpus: tuple[Gpu, ...], memory_bytes: int) -> dict[str, str]:
    """Ask for the memory of each device that models may use."""
    found = {
        g.device_id: _ask_size(f"Memory of {g.device_id} ({g.name}) for models; 0: do not use it", GPU_SHARE, g.total_bytes)
        for g in gpus
    }
    if all(budget == "0" for budget in found.values()):
        proposed = _round_size(int(memory_bytes * MEMORY_SHARE))
        found[CPU] = _ask_size(f"Memory of this host for models on {CPU}", proposed, memory_bytes, is_needed=True)
    return found


def _ask_size(question: str, proposed: str, total_bytes: int, *, is_needed: bool = False) -> str:
    """Ask until the reply is a size or a share of what there is."""
    while True:
        reply = str(typer.prompt(question, default=proposed)).strip()
        if reply == "0" and not is_needed:
            return reply
        try:
            nbytes = int(total_bytes * float(reply[:-1]) / 100) if reply.endswith("%") else parse_size(reply)
        except (OverflowError, ValueError):
            nbytes = 0
        if 0 < nbytes <= total_bytes:
            return reply
        typer.echo(f"Give a size such as 4GiB, or a share such as 50%, of at most {format_size(total_bytes)}.")


def _round_size(nbytes: int) -> str:
    return f"{nbytes // _GIB}GiB" if nbytes >= 4 * _GIB else f"{max(1, nbytes // _MIB)}MiB"


def _list_used(gpus: tuple[Gpu, ...], budgets: Mapping[str, str]) -> list[str]:
    used = [g.device_id for g in gpus if budgets.get(g.device_id) != "0"]
    return used or [CPU]


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

    In a terminal it asks for the memory of each device, the port and a first model.

    Example: [bold]thaw init --model qwen3=hf://Qwen/Qwen3-0.6B[/]
    """
    out, target = screen(as_json), local_path(output)
    if target.exists():
        raise CommandError(f"{target} exists.", "Name another file, or remove this one.", code="file_exists")
    models, gpus, memory_bytes = _parse_models(model or []), find_gpus(), available_memory()
    found = ", ".join(f"{g.device_id} ({g.name})" for g in gpus) or f"no NVIDIA GPU, and {format_size(memory_bytes)} of memory"
    out.print(f"found: {escape(found)}")
    budgets: dict[str, str] = {}
    if not (yes or as_json) and sys.stdin.isatty():
        budgets = _ask_budgets(gpus, memory_bytes)
        port = port or int(typer.prompt("Port of the endpoint", default=DEFAULT_PORT, type=int))
        if not models and (source := typer.prompt("Source of a first model (empty: none)", default="", show_default=False)):
            models[str(typer.prompt("Its name"))] = source
    text = compose_file(gpus, memory_bytes, port or DEFAULT_PORT, models, budgets)
    try:
        with target.open("x") as file:
            file.write(text)
    except OSError as e:
        raise CommandError(f"{target} cannot be written: {e.strerror}.", "Name a file in a directory that you may write to.") from e
    out.print(f"[green]✓[/] {escape(str(output))}. Start it: [bold]{program()} up --config {escape(str(output))}[/]")
    return {"output": str(target), "devices": _list_used(gpus, budgets), "models": list(models), "yaml": text}
