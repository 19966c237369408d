"""A histogram for the request path, with exemplars that name traces.

OpenTelemetry's Prometheus exporter drops exemplars, and its `record` takes many times as long as
`Histogram.record`, which every request calls for each phase of its time to the first token.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.samples import Exemplar

MAX_SERIES = 2_000
"""Combinations of label values; OpenTelemetry's limit for an instrument."""


class _Series:
    """Counts of one combination of label values, and the last trace of each bucket."""

    __slots__ = ("counts", "exemplars", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.total = 0.0
        self.exemplars: list[tuple[str, float, float] | None] = [None] * buckets


class Histogram:
    """A collector of observations by label values, for the thread of one event loop.

    Beyond `max_series` combinations others are counted together, with empty label values: the
    series of a removed model stay until the gateway ends.

    Args:
        name: As Prometheus has it, with its unit.
        bounds: Upper bounds of the buckets, ascending, without infinity.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float], max_series: int = MAX_SERIES) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._bounds = tuple(map(float, bounds))
        self._max_series = max_series
        self._series: dict[tuple[str, ...], _Series] = {}

    def record(self, values: tuple[str, ...], observed: float, trace_id: str = "") -> None:
        """Count an observation.

        Args:
            values: One for each label.
            trace_id: Of the trace that explains it; empty: no trace was exported.
        """
        series = self._series.get(values)
        if series is None:
            series = self._add(values)
        bucket = bisect.bisect_left(self._bounds, observed)
        series.counts[bucket] += 1
        series.total += observed
        if trace_id:
            series.exemplars[bucket] = (trace_id, observed, time.time())

    def _add(self, values: tuple[str, ...]) -> _Series:
        if len(self._series) >= self._max_series:
            values = ("",) * len(values)
        return self._series.setdefault(values, _Series(len(self._bounds) + 1))

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        ends = [*map(str, self._bounds), "+Inf"]
        for values, series in self._series.items():
            exemplars = (None if e is None else Exemplar({"trace_id": e[0]}, e[1], e[2]) for e in series.exemplars)
            family.add_metric(values, list(zip(ends, accumulate(series.counts), exemplars, strict=True)), series.total)
        yield family
