"""Gauges and counters whose values are read at each scrape.

OpenTelemetry's observable instruments keep each set of labels for ever, and 2,000 of them at most:
later devices are counted together, and the counters of nodes that are gone stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Value = tuple[float, dict[str, str]]
"""A value and its labels."""
Read = Callable[[], Iterable[Value]]


@dataclass(frozen=True, slots=True)
class _Metric:
    family: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    text: str
    unit: str
    read: Read


class PresentValues:
    """A collector of present values: a row that is no longer read is no longer exported.

    Metrics and labels are named as in OpenTelemetry, with dots; Prometheus gets underscores.
    """

    def __init__(self) -> None:
        self._metrics: list[_Metric] = []

    def add_gauge(self, name: str, read: Read, unit: str, text: str) -> None:
        """Add a gauge.

        Args:
            name: Without its unit.
            read: Returns the values, in any thread.
            unit: As Prometheus has it, in the plural; empty: none.
            text: What the values are.
        """
        self._metrics.append(_Metric(GaugeMetricFamily, _with_underscores(name), text, unit, read))

    def add_counter(self, name: str, read: Read, unit: str, text: str) -> None:
        """Add a counter, with the arguments of `add_gauge`; `name`: without `_total`."""
        self._metrics.append(_Metric(CounterMetricFamily, _with_underscores(name), text, unit, read))

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Read the metrics that have values now."""
        for metric in self._metrics:
            values = [(value, {_with_underscores(k): v for k, v in labels.items()}) for value, labels in metric.read()]
            if not values:
                continue
            # Prometheus' families have the same labels in each row; an empty one counts as absent.
            names = sorted({name for _, labels in values for name in labels})
            family = metric.family(metric.name, metric.text, labels=names, unit=metric.unit)
            for value, labels in values:
                family.add_metric([labels.get(name, "") for name in names], value)
            yield family


def _with_underscores(name: str) -> str:
    return name.replace(".", "_")
