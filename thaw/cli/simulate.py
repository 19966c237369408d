"""`thaw simulate`: what the scheduler would do with a cluster and a workload that are not there."""

from __future__ import annotations

import json
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from thaw.cli.output import Document, Json, screen, verb
from thaw.errors import CommandError


class Workload(StrEnum):
    SYNTHETIC = "synthetic"
    TRACE = "trace"


class Policy(StrEnum):
    THAW = "thaw"


@verb
def simulate(
    cluster: Annotated[Path, typer.Option(help="Nodes, devices and links (docs/simulator.md).", metavar="FILE")],
    models: Annotated[Path, typer.Option(help="Models, how they are served, and their SLOs.", metavar="FILE")],
    workload: Annotated[
        Workload, typer.Option(help="synthetic: drawn from distributions; trace: read from --trace.")
    ] = Workload.SYNTHETIC,
    trace: Annotated[Path | None, typer.Option(help="CSV with the columns at, model, prompt_tokens, output_tokens.")] = None,
    policy: Annotated[Policy, typer.Option(help="thaw: the scheduler as it runs.")] = Policy.THAW,
    seeds: Annotated[int, typer.Option(min=1, help="So many runs, with the seeds 0, 1 …")] = 1,
    duration: Annotated[float, typer.Option(min=1, help="Seconds in which requests arrive.")] = 600.0,
    rps: Annotated[float, typer.Option(help="Requests a second, over all models.")] = 1.0,
    cv: Annotated[float, typer.Option(help="Coefficient of variation of the times between arrivals (Gamma; 1: Poisson).")] = 1.0,
    zipf: Annotated[float, typer.Option(min=0, help="The n-th model has a share of 1/n^ZIPF.")] = 1.0,
    prompt_tokens: Annotated[float, typer.Option(help="Mean.")] = 256.0,
    output_tokens: Annotated[float, typer.Option(help="Mean.")] = 128.0,
    length_cv: Annotated[
        float, typer.Option(min=0, help="Coefficient of variation of both lengths (log-normal; 0: all alike).")
    ] = 0.0,
    as_json: Json = False,
) -> Document:
    """Simulate a cluster: the scheduler's own decisions on devices, links and requests that exist in time only.

    Example: [bold]thaw simulate --cluster cluster.yaml --models models.yaml --rps 0.8 --cv 8 --seeds 3[/]
    """
    if (trace is not None) != (workload is Workload.TRACE):
        raise CommandError("--workload trace and --trace FILE go together.")
    out = screen(as_json)
    numbers = {
        "rps": rps,
        "cv": cv,
        "zipf": zipf,
        "prompt-tokens": prompt_tokens,
        "output-tokens": output_tokens,
        "length-cv": length_cv,
    }
    arguments = ["--cluster", str(cluster), "--models", str(models), "--seeds", str(seeds), "--duration", str(duration)]
    arguments += [part for name, value in numbers.items() for part in (f"--{name}", str(value))]
    arguments += ["--trace", str(trace)] if trace is not None else []
    with out.status("simulating"):
        document = _simulate(arguments)
    out.print(_table(document["runs"]))
    return document


def _simulate(arguments: list[str]) -> dict[str, Any]:
    """The simulation's own document. A process of its own: the command line does not import services."""
    command = [sys.executable, "-m", "services.scheduler.simulation", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except ValueError as e:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise CommandError(f"The simulation failed: {last}") from e
    if "error" in document:
        raise CommandError(document["error"]["message"], code=document["error"]["code"])
    return document


def _table(runs: list[dict[str, Any]]) -> Table:
    table = Table("policy", "seed", "requests", "failed", "TTFT p50", "p95", "p99", "SLO", "dram/ssd/remote", "device s")
    for run in runs:
        ttft = [_seconds(run["ttft"][p]) for p in ("p50", "p95", "p99")]
        attained = "" if run["slo_attainment"] is None else f"{run['slo_attainment']:.1%}"
        loads = "/".join(str(run["loads"][tier]) for tier in ("dram", "ssd", "remote"))
        counts = (str(run["seed"]), f"{run['requests']:,}", str(run["failed"]))
        table.add_row(run["policy"], *counts, *ttft, attained, loads, f"{run['device_seconds']:,.0f}")
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
