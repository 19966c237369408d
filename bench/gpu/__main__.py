"""Run the tests and benchmarks that need a GPU, in order of value.

    python -m bench.gpu [--plan] [--steps tests,copies] [--within 30m] [--device cuda:0]
        [--work DIR] [--figures docs/performance.d] [--rehearse]

Each step is a process with a limit of at most ten minutes. A step that fails does not stop the
rest. A step's figures go to `gpu_STEP.json` in the directory of --figures, with the machine and the
command. Its output goes to `STEP.log` in the work directory. At the end a table shows all figures
beside their goals. Nothing is downloaded.

--plan      print the steps with their estimated times, and what this machine lacks
--within    leave out steps that are not expected to end in this time, which is for all of them
--work      directory for models and logs, with 48 GB of free space; by default a temporary one
            that is removed at the end
--rehearse  run the steps that serve models with tiny ones on a cpu device with memory of its own:
            shows on a machine without a GPU that the steps work. The figures say nothing about a
            GPU: they go to the work directory, not to --figures

Exit status: 0: all steps measured, 1: some were not, 2: there is no such device.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.gpu.plan import Step, choose
from bench.gpu.rehearsal import REHEARSED, SEPARATE, rehearse
from bench.gpu.requirements import find_missing
from bench.gpu.runner import NOTHING_MEASURED, Outcome, Processes, State, run_steps
from thaw.units import parse_duration

FIGURES = Path("docs/performance.d")


def show_plan(out: Console, steps: Sequence[Step], missing: Sequence[str]) -> None:
    """Print the steps, and what this machine lacks."""
    table = Table("", "step", "shows", "expected", "limit", "goals", title="python -m bench.gpu")
    for number, step in enumerate(steps, 1):
        goals = "\n".join(goal.text for goal in step.goals)
        table.add_row(str(number), step.name, step.shows, f"{step.estimate_s:.0f} s", f"{step.limit_s:.0f} s", goals)
    out.print(table)
    expected, longest = sum(s.estimate_s for s in steps), sum(s.limit_s for s in steps)
    out.print(f"expected {expected / 60:.0f} minutes, at most {longest / 60:.0f}; the expected times are calculated, not measured")
    for text in missing:
        out.print(f"missing here: {text}", soft_wrap=True, highlight=False)


def show_summary(out: Console, outcomes: Sequence[Outcome]) -> None:
    """Print each step's figures with goals and its headline figures, or why there are none."""
    table = Table("step", "figure", "value", "goal", title="GPU")
    for outcome in outcomes:
        rows: list[tuple[str, str, str]] = []
        for goal in outcome.step.goals:
            value, met = outcome.figures.get(goal.figure), goal.is_met(outcome.figures)
            mark = {True: "[green]met[/]", False: "[red]missed[/]", None: "[dim]not measured[/]"}[met]
            rows.append((goal.figure, f"{value:.4g}" if value is not None else "", f"{mark}: {goal.text}"))
        rows += [(name, f"{outcome.figures[name]:.4g}", "") for name in outcome.step.headline if name in outcome.figures]
        if outcome.state is not State.MEASURED:
            rows.append((f"[yellow]{outcome.state}[/]", "", outcome.reason))
        for row in rows or [(outcome.state, "", "")]:
            table.add_row(outcome.step.name, *row)
        table.add_section()
    out.print(table)


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """Return 2 if no step found the device, 1 if a step was not measured, else 0."""
    states = {outcome.state for outcome in outcomes}
    if State.NO_DEVICE in states and State.MEASURED not in states:
        return NOTHING_MEASURED
    return 0 if states <= {State.MEASURED} else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--steps", type=lambda text: text.split(","), default=[])
    parser.add_argument("--within", type=parse_duration, metavar="TIME")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--figures", type=Path, default=FIGURES)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    out = Console(width=160 if not sys.stdout.isatty() else None)
    try:
        steps = choose(options.steps or (REHEARSED if options.rehearse else ()))
        if options.rehearse:
            steps = rehearse(steps)
    except KeyError as e:
        parser.error(e.args[0])
    if options.plan:
        show_plan(out, steps, find_missing(options.device, options.work))
        return 0
    if not options.rehearse and (missing := find_missing(options.device, only_device=True)):
        print(f"nothing measured: {missing[0]}", file=sys.stderr)
        return NOTHING_MEASURED
    with tempfile.TemporaryDirectory(prefix="thaw-gpu-") as temporary:
        work = options.work if options.work is not None else Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        figures, device = options.figures, options.device
        if options.rehearse:
            figures, device = work / "rehearsed", SEPARATE
        processes = Processes(figures, work, device)
        outcomes = run_steps(
            steps, processes.run, lambda found: print(found.line(), file=sys.stderr, flush=True), within_s=options.within
        )
        show_summary(out, outcomes)
    return exit_status(outcomes)


if __name__ == "__main__":
    sys.exit(main())
