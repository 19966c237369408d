"""Implement `thaw simulate`: policies on a simulated cluster and workload."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from thaw.cli.api import Api
from thaw.cli.output import STDOUT, Document, screen, verb
from thaw.cli.recording import record
from thaw.errors import CommandError
from thaw.units import parse_duration

Runs = list[dict[str, Any]]


class Workload(StrEnum):
    SYNTHETIC = "synthetic"
    TRACE = "trace"


class Popularity(StrEnum):
    ZIPF = "zipf"
    AZURE = "azure"


_DRAWN = "Drawn workloads"
_TRACES = "Recorded workloads"


@verb
def simulate(
    cluster: Annotated[Path | None, typer.Option(help="Nodes, devices and links (docs/simulator.md).", metavar="FILE")] = None,
    models: Annotated[Path | None, typer.Option(help="Models, how they are served, and their SLOs.", metavar="FILE")] = None,
    from_mesh: Annotated[
        bool,
        typer.Option(
            "--from-mesh", help="Simulate the nodes, models and recorded requests of the running mesh instead of these files."
        ),
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="With --from-mesh: keep the generated files in this directory.", metavar="DIR")
    ] = None,
    last: Annotated[
        str | None, typer.Option(help="With --from-mesh: only requests of so long until now, e.g. 1h.", metavar="TIME")
    ] = None,
    latest: Annotated[
        int | None, typer.Option(min=1, help="With --from-mesh: only the latest N of the requests.", metavar="N")
    ] = None,
    without: Annotated[str | None, typer.Option(help="Simulate each policy again without this node.", metavar="NODE")] = None,
    workload: Annotated[
        Workload | None,
        typer.Option(
            help="synthetic: drawn from distributions; trace: recorded (by default with --trace and --from-mesh).",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Policies by name, comma-separated; a wrong one lists them all.", metavar="A,B,C")
    ] = "thaw",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each policy, with the seeds 0, 1, …")] = 1,
    mesh: Annotated[
        bool,
        typer.Option("--mesh", help="Simulate the live scheduler's loop, state and messages too."),
    ] = False,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file; -: print them.", metavar="PATH")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Draw distributions and bars in this directory (needs thaw-mesh\\[plots]).", metavar="DIR")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="CSV of our own, of the Azure LLM traces of 2023 or of BurstGPT; .jsonl of thaw trace --export.",
            metavar="FILE",
            rich_help_panel=_TRACES,
        ),
    ] = None,
    speed: Annotated[float, typer.Option(help="Speed of the replay: 2 is twice as fast.", rich_help_panel=_TRACES)] = 1.0,
    duration: Annotated[float, typer.Option(min=1, help="Seconds in which requests arrive.", rich_help_panel=_DRAWN)] = 600.0,
    rps: Annotated[float, typer.Option(help="Requests a second, over all models.", rich_help_panel=_DRAWN)] = 1.0,
    cv: Annotated[
        float | None,
        typer.Option(help="Coefficient of variation of the times between arrivals (Gamma; 1: Poisson).", rich_help_panel=_DRAWN),
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="Every model has its own arrival process.", rich_help_panel=_DRAWN)] = False,
    popularity: Annotated[
        Popularity, typer.Option(help="azure: log-normal, like Azure Functions.", rich_help_panel=_DRAWN)
    ] = Popularity.ZIPF,
    zipf: Annotated[float, typer.Option(min=0, help="The n-th model has a share of 1/n^ZIPF.", rich_help_panel=_DRAWN)] = 1.0,
    locality: Annotated[
        str | None, typer.Option(help="L1, L2, L3 or L4 of the Tangram paper.", metavar="LEVEL", rich_help_panel=_DRAWN)
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="sharegpt, gsm8k, humaneval, longbench or alpaca.", metavar="DATASET", rich_help_panel=_DRAWN),
    ] = None,
    prompt_tokens: Annotated[float, typer.Option(help="Mean.", rich_help_panel=_DRAWN)] = 256.0,
    output_tokens: Annotated[float, typer.Option(help="Mean.", rich_help_panel=_DRAWN)] = 128.0,
    length_cv: Annotated[
        float, typer.Option(min=0, help="Coefficient of variation of both (log-normal; 0: all alike).", rich_help_panel=_DRAWN)
    ] = 0.0,
    burst: Annotated[
        list[str] | None,
        typer.Option(
            help="From AT on, for SECONDS, TIMES as fast; may be repeated.", metavar="AT:SECONDS:TIMES", rich_help_panel=_DRAWN
        ),
    ] = None,
) -> Document:
    """Simulate scheduling policies on a cluster's nodes, models and requests.

    Examples:
    [bold]thaw simulate --from-mesh --mesh --policy thaw,lru[/]
    [bold]thaw simulate --from-mesh --mesh --last 1h --without node-1[/]
    [bold]thaw simulate --cluster c.yaml --models m.yaml --rps 0.8 --cv 8[/]
    """
    chosen = workload or (Workload.TRACE if trace is not None or from_mesh else Workload.SYNTHETIC)
    if (trace is not None or from_mesh) < (chosen is Workload.TRACE) or (trace is not None and chosen is Workload.SYNTHETIC):
        raise CommandError("--workload trace and --trace FILE go together.")
    if not from_mesh and (cluster is None or models is None):
        raise CommandError("A simulation needs --cluster FILE and --models FILE, or --from-mesh.")
    if keep is not None and not from_mesh:
        raise CommandError("--keep DIR keeps the files of --from-mesh.")
    if (last is not None or latest is not None) and not from_mesh:
        raise CommandError("--last and --latest choose among the requests of --from-mesh.")
    since = time.time() - _seconds_of(last) if last is not None else None
    order: dict[str, Any] = {
        "policies": [p.strip() for p in policy.split(",") if p.strip()],
        "seeds": seeds,
        "mesh": mesh,
        "without": without,
        "speed": speed,
        "rps": rps,
        "duration": duration,
        "cv": cv,
        "zipf": zipf,
        "popularity": popularity.value,
        "each": each,
        "locality": locality,
        "lengths": lengths,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "length_cv": length_cv,
        "bursts": [_burst(b) for b in burst or ()],
        "plots": str(plots) if plots is not None else None,
    }
    out = screen(as_json == STDOUT)
    with contextlib.ExitStack() as stack:
        order |= {"cluster": cluster, "models": models, "trace": trace}
        if from_mesh:
            directory = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="thaw-simulate-")))
            made = record(
                Api.find(), directory, out, requests=chosen is Workload.TRACE and trace is None, since=since, latest=latest
            )
            order |= {"recording": directory} | {what: order[what] or path for what, path in made.items()}
        document = _simulate(order, out)
    if (recorded := document.get("recorded")) is not None and chosen is Workload.TRACE:
        out.print(_describe_recorded(recorded))
    for table in _tables(document["runs"]):
        out.print(table)
    for path in document["plots"]:
        out.print(f"drawn: {escape(str(path))}")
    if as_json is not None and as_json != STDOUT:
        try:
            as_json.write_text(json.dumps(document, indent=1) + "\n")
        except OSError as e:
            raise CommandError(f"{as_json} cannot be written: {e.strerror}") from e
    return document


def _seconds_of(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as e:
        raise CommandError(f"--last {text}: {e}.") from e


def _describe_recorded(found: dict[str, Any]) -> str:
    """Return what the mesh itself did with the requests, to compare the simulation with."""
    times = ", ".join(f"{p} {_seconds(value)}" for p, value in found["ttft"].items())
    left_out = f"; left out {found['left_out']} without a token or a registered model" if found["left_out"] else ""
    return f"recorded: {found['requests']} requests, {found['cold']} cold, TTFT {times}{left_out}"


def _burst(text: str) -> list[float]:
    parts = text.split(":")
    try:
        found = [float(p) for p in parts]
    except ValueError as e:
        raise CommandError(f"--burst {text}: it is written AT:SECONDS:TIMES, in numbers.") from e
    if len(found) != 3 or found[0] < 0 or min(found[1:]) <= 0:
        raise CommandError(f"--burst {text}: it is written AT:SECONDS:TIMES, the last two more than 0.")
    return found


def _simulate(order: dict[str, Any], out: Console) -> Document:
    """Run the simulation as a process, and return its document.

    The command line does not import services.
    """
    command = [sys.executable, "-m", "simulator"]
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    last = ""
    with (
        Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child,
        ThreadPoolExecutor(1, thread_name_prefix="simulation") as reader,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        task = progress.add_task("simulating", total=None)
        # The simulator's messages end after its document, which may have more bytes than a pipe.
        output = reader.submit(child.stdout.read)
        with contextlib.suppress(BrokenPipeError):  # it ended already; its messages say why
            child.stdin.write(json.dumps(order, default=str))
            child.stdin.close()
        try:
            for line in child.stderr:
                if line.startswith('{"done"'):
                    update = json.loads(line)
                    progress.update(task, completed=update["done"], total=update["of"])
                else:
                    last = line.strip() or last
            text = output.result()
        except BaseException:
            child.terminate()
            raise
    try:
        document: Document = json.loads(text)
    except ValueError as e:
        raise CommandError(f"The simulation failed: {last or f'status {child.returncode}'}") from e
    if "error" in document:
        raise CommandError(document["error"]["message"], code=document["error"]["code"])
    return document


def _tables(runs: Runs) -> tuple[Table, Table]:
    """Format the latency and cost of requests: a line for each run.

    With several seeds there is a line of means for each policy instead.
    """
    ttft, tpot = ("TTFT p50", "p95", "p99"), ("TPOT p50", "p95", "p99")
    fared = Table("policy", "seed", "requests", "failed", *ttft, *tpot, "SLO", "functions")
    tiers = [t for t in runs[0]["loads"] if any(r["loads"][t] for r in runs)]
    took = Table("policy", "seed", *(f"from {t}" for t in tiers), "migrations", "preemptions", "suspensions", "device s", "GB s")
    several = len({r["seed"] for r in runs}) > 1
    for policy, without in dict.fromkeys((r["policy"], r["without"]) for r in runs):
        mine = [r for r in runs if (r["policy"], r["without"]) == (policy, without)]
        name = policy if without is None else f"{policy} without {escape(without)}"
        for shown in [mine] if several else [[r] for r in mine]:
            whose = (name, f"{len(shown)} seeds" if several else str(shown[0]["seed"]))
            fared.add_row(*whose, *_format_row(shown))
            counts = [("loads", t) for t in tiers] + [("migrations",), ("preemptions",), ("suspensions",)]
            held = (("device_seconds",), ("device_memory_seconds",))
            took.add_row(*whose, *(f"{_mean(shown, *keys) or 0:,.0f}" for keys in (*counts, *held)))
    return fared, took


def _mean(runs: Runs, *keys: str) -> float | None:
    values = []
    for run in runs:
        value: Any = run
        for key in keys:
            value = value[key]
        if value is not None:
            values.append(float(value))
    return fmean(values) if values else None


def _format_row(runs: Runs) -> list[str]:
    ttft = [_seconds(_mean(runs, "ttft", p)) for p in ("p50", "p95", "p99")]
    tpot = ["" if (t := _mean(runs, "tpot", p)) is None else f"{t * 1e3:.0f} ms" for p in ("p50", "p95", "p99")]
    attained = _mean(runs, "slo_attainment")
    failed = (_mean(runs, "failed") or 0) + (_mean(runs, "timed_out") or 0)
    functions = f"{_mean(runs, 'functions_compliant') or 0:.0f} of {_mean(runs, 'functions') or 0:.0f}"
    shown = "" if attained is None else f"{attained:.1%}"
    return [f"{_mean(runs, 'requests') or 0:,.0f}", f"{failed:,.0f}", *ttft, *tpot, shown, functions]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
