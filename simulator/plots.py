"""Plot runs: distributions over all seeds, and means with 95 % intervals.

matplotlib is an optional dependency.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from shared.errors import InvalidRequest
from simulator.report import Outcome

Run = tuple[str, int, Outcome]
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)
"""Student's t for 1, 2 … degrees of freedom; beyond, 2."""


def check_available() -> None:
    """Check for matplotlib.

    Raises:
        InvalidRequest: It is missing; the text has the command that installs it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequest("Plots need matplotlib, which is not installed: pip install 'thaw-mesh[plots]'")


def draw(runs: Sequence[Run], directory: Path) -> list[Path]:
    """Draw the plots and return the files."""
    check_available()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InvalidRequest(f"{directory} cannot be created: {e.strerror}") from e
    names = list(dict.fromkeys(name for name, _, _ in runs))
    made = []
    for title, unit, values in (
        ("ttft", "time to first token, s", lambda o: [s.ttft for s in o.served]),
        ("tpot", "time per output token, s", lambda o: [s.tpot for s in o.served if s.tpot > 0]),
        ("startup", "start-up latency and pause, s", lambda o: [s.startup for s in o.served]),
    ):
        series = {n: v for n in names if (v := _pool_values(runs, n, values))}
        if series:  # otherwise no request had such a figure
            made.append(_cdf(pyplot, directory / f"cdf_{title}.png", unit, series))
    for title, unit, figure in (
        ("ttft_p99", "P99 time to first token, s", lambda f: f["ttft"]["p99"]),
        ("ttft_mean", "mean time to first token, s", lambda f: f["ttft"]["mean"]),
        ("slo_attainment", "share of requests in time", lambda f: f["slo_attainment"]),
        ("device_memory_seconds", "GB x s of device memory", lambda f: f["device_memory_seconds"]),
    ):
        made.append(_bars(pyplot, directory / f"bars_{title}.png", unit, {n: _by_seed(runs, n, figure) for n in names}))
    return made


def _pool_values(runs: Sequence[Run], name: str, values: Callable[[Outcome], list[float]]) -> list[float]:
    return sorted(v for n, _, outcome in runs if n == name for v in values(outcome))


def _by_seed(runs: Sequence[Run], name: str, figure: Callable[[dict[str, Any]], float | None]) -> list[float]:
    return [v for n, _, outcome in runs if n == name and (v := figure(outcome.figures())) is not None]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % confidence interval.

    The width is 0 for a single value.
    """
    if len(values) < 2:
        return (values[0] if values else 0.0), 0.0
    t = T95[len(values) - 2] if len(values) - 2 < len(T95) else 2.0
    return fmean(values), t * stdev(values) / sqrt(len(values))


def _cdf(pyplot: Any, path: Path, unit: str, series: dict[str, list[float]]) -> Path:
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, values in series.items():
        axes.step(values, [(n + 1) / len(values) for n in range(len(values))], where="post", label=name)
    if all(v[0] > 0 for v in series.values()):
        axes.set_xscale("log")
    axes.set(xlabel=unit, ylabel="share of requests", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _bars(pyplot: Any, path: Path, unit: str, series: dict[str, list[float]]) -> Path:
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    found = [interval(values) for values in series.values()]
    axes.bar(list(series), [m for m, _ in found], yerr=[half for _, half in found], capsize=4)
    axes.set(ylabel=unit)
    axes.tick_params(axis="x", rotation=30)
    axes.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
