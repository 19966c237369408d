"""The time per token of groups and of one engine, paired: the part `tpot` of `bench.pipeline`.

All instances are up at once. One stream at a time decodes the same prompt: by one engine and by
each group in turn, every second round in the reverse order. Each ratio is that of a group to the
engine in the same round, because the speed of a machine changes within minutes.

Engines have the threads that nodeagents give them (`THAW_ENGINE_THREADS`). The CPU time is that of
all engines of the mesh while the stream runs: it includes the start of the stream, and the idle
engines, which take almost none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from rich.table import Table

from bench.moving import Bed, Timed, Values, completion
from bench.report import spread
from tests.support.mesh import is_engine

TOKENS = 96
"""Tokens of a stream; the first `SETTLED` are no sample of the time per token."""
SETTLED = 8
SINGLE = "single"


def tpot_ms(at: Sequence[float]) -> float:
    """Return the median time between tokens that arrived at these seconds."""
    return median(b - a for a, b in pairwise(at)) * 1e3


def measure_tpot(mesh: Bed, models: Mapping[str, str], rounds: int, prompt: int, figures: Values) -> None:
    """Add each model's time per token and CPU time per token, one sample a round.

    Args:
        mesh: Serves the models.
        models: Models by name of their figures; one of them is `SINGLE`.
        rounds: Rounds after the first one, which only warms up.
        prompt: Tokens of the prompt.
        figures: Gets `tpot.NAME.ms` and `tpot.NAME.cpu_ms`.
    """
    for model in models.values():
        mesh.json("wake", model)
    engines = [p for p in mesh.processes() if is_engine(p)]
    names = list(models)
    for number in range(rounds + 1):
        for name in names if number % 2 else reversed(names):
            before = sum(sum(p.cpu_times()[:2]) for p in engines)
            stream = Timed(mesh.url, completion(models[name], prompt, TOKENS))
            stream.start()
            stream.result()
            if stream.error:
                raise RuntimeError(stream.error)
            spent_s = sum(sum(p.cpu_times()[:2]) for p in engines) - before
            if number:
                figures[f"tpot.{name}.ms"].append(tpot_ms(stream.at[SETTLED:]))
                figures[f"tpot.{name}.cpu_ms"].append(spent_s * 1e3 / TOKENS)
    for model in models.values():
        mesh.json("sleep", model)
    mesh.await_settled()


def add_ratios(figures: Values) -> None:
    """Add each group's ratios to the engine of the same round: `tpot.NAME.ratio`, `.cpu_ratio`."""
    for name in _groups(figures):
        for unit, ratio in (("ms", "ratio"), ("cpu_ms", "cpu_ratio")):
            pairs = zip(figures[f"tpot.{name}.{unit}"], figures[f"tpot.{SINGLE}.{unit}"], strict=True)
            figures[f"tpot.{name}.{ratio}"] = [group / single for group, single in pairs]


def goal_lines(figures: Values, goal: float) -> list[str]:
    """Return a line for each group whose ratios were measured."""
    return [
        f"time per token of {name} by one engine, paired: {_fine(figures[f'tpot.{name}.ratio'])} (goal: at most {goal})"
        for name in _groups(figures)
    ]


def tpot_table(figures: Values) -> Table:
    columns = ("instance", "ms per token", "by one engine", "CPU ms per token", "by one engine")
    table = Table(*columns, title="Time per token, paired in rounds: median (least to most)")
    for name in (SINGLE, *_groups(figures)):
        ratios, cpu_ratios = figures.get(f"tpot.{name}.ratio"), figures.get(f"tpot.{name}.cpu_ratio")
        table.add_row(
            name,
            _fine(figures[f"tpot.{name}.ms"]),
            _fine(ratios) if ratios else "1",
            spread(figures[f"tpot.{name}.cpu_ms"]),
            _fine(cpu_ratios) if cpu_ratios else "1",
        )
    return table


def _groups(figures: Values) -> list[str]:
    names = [key.removeprefix("tpot.").removesuffix(".cpu_ms") for key in figures if key.endswith(".cpu_ms")]
    return [name for name in names if name != SINGLE]


def _fine(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
