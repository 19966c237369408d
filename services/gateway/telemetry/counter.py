"""A counter for the request path: OpenTelemetry's `add` takes many times as long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily

from services.gateway.telemetry.histogram import MAX_SERIES


class Counter:
    """A collector of counts by label values, for the thread of one event loop.

    Beyond `max_series` combinations others are counted together, with empty label values.

    Args:
        name: As Prometheus has it, without `_total`.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str], max_series: int = MAX_SERIES) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._max_series = max_series
        self._counts: dict[tuple[str, ...], int] = {}

    def add(self, values: tuple[str, ...]) -> None:
        """Count one more.

        Args:
            values: One for each label.
        """
        if values not in self._counts and len(self._counts) >= self._max_series:
            values = ("",) * len(values)
        self._counts[values] = self._counts.get(values, 0) + 1

    def collect(self) -> Iterable[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(values, count)
        yield family
