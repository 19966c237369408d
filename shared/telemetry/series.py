"""Counters and histograms that export the sets of labels recorded last.

OpenTelemetry's instruments keep the first 2,000 sets of labels for ever, and count all others
together: models that are registered later would have no rows of their own.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

MAX_SERIES = 10_000
"""Sets of labels of one metric; beyond it the one that was recorded the longest ago is dropped."""
V = TypeVar("V")


class Counter:
    """A collector of sums by labels.

    Metrics and labels are named as in OpenTelemetry, with dots; Prometheus gets underscores.
    """

    def __init__(self, name: str, text: str, unit: str = "", most: int = MAX_SERIES) -> None:
        """Create a counter.

        Args:
            name: Without its unit.
            text: What is counted.
            unit: As Prometheus has it, in the plural; empty: none.
            most: Sets of labels that are kept.
        """
        self._name, self._text, self._unit = _with_underscores(name), text, unit
        self._rows = _Rows[float](most)

    def add(self, amount: float, labels: Mapping[str, str]) -> None:
        """Add to the sum of these labels."""
        self._rows.change(labels, lambda total: (total or 0.0) + amount)

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Return the metric, once it has values."""
        names, rows = self._rows.read()
        if rows:
            family = CounterMetricFamily(self._name, self._text, labels=names, unit=self._unit)
            for labels, total in rows:
                family.add_metric(labels, total)
            yield family


class Histogram:
    """A collector of observations by labels, with the arguments of `Counter`."""

    def __init__(self, name: str, text: str, unit: str, bounds: Sequence[float], most: int = MAX_SERIES) -> None:
        """Create a histogram; `bounds` are the buckets' upper ones, ascending, without infinity."""
        self._name, self._text, self._unit, self._bounds = _with_underscores(name), text, unit, tuple(bounds)
        self._rows = _Rows[_Observed](most)

    def record(self, value: float, labels: Mapping[str, str]) -> None:
        """Count an observation."""
        bucket = bisect.bisect_left(self._bounds, value)

        def observe(known: _Observed | None) -> _Observed:
            before = known or _Observed((0,) * (len(self._bounds) + 1), 0.0)
            counts = (n + 1 if at == bucket else n for at, n in enumerate(before.counts))
            return _Observed(tuple(counts), before.total + value)

        self._rows.change(labels, observe)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return the metric, once it has values."""
        names, rows = self._rows.read()
        if rows:
            ends = [*map(str, self._bounds), "+Inf"]
            family = HistogramMetricFamily(self._name, self._text, labels=names, unit=self._unit)
            for labels, seen in rows:
                family.add_metric(labels, list(zip(ends, accumulate(seen.counts), strict=True)), seen.total)
            yield family


class _Observed(NamedTuple):
    counts: tuple[int, ...]
    total: float


class _Rows(Generic[V]):
    """Values by labels, the one that changed last at the end. Threads may change and read them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._values: dict[tuple[tuple[str, str], ...], V] = {}

    def change(self, labels: Mapping[str, str], change: Callable[[V | None], V]) -> None:
        key = tuple(sorted((_with_underscores(name), value) for name, value in labels.items()))
        with self._lock:
            self._values[key] = change(self._values.pop(key, None))
            if len(self._values) > self._most:
                del self._values[next(iter(self._values))]

    def read(self) -> tuple[list[str], list[tuple[list[str], V]]]:
        """Return the names of all labels, and the values with theirs; an absent label is empty."""
        with self._lock:
            values = list(self._values.items())
        names = sorted({name for key, _ in values for name, _ in key})
        return names, [([dict(key).get(name, "") for name in names], value) for key, value in values]


def _with_underscores(name: str) -> str:
    return name.replace(".", "_")
