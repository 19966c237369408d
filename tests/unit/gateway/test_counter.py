"""Counters of the request path, as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.telemetry.counter import Counter


def read(counter: Counter) -> dict[tuple[str, ...], float]:
    """Return the counts by label values, in the order of the labels' names."""
    registry = CollectorRegistry()
    registry.register(counter)
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())
    assert (family.name, family.type) == ("thaw_things", "counter")
    return {tuple(value for _, value in sorted(s.labels.items())): s.value for s in family.samples if s.name == "thaw_things_total"}


def test_counts_by_label_values() -> None:
    counter = Counter("thaw_things", "Things.", ("a", "b"))
    for values in (("x", "1"), ("x", "1"), ("y", "1")):
        counter.add(values)
    assert read(counter) == {("x", "1"): 2.0, ("y", "1"): 1.0}
    assert read(counter) == read(counter)


def test_number_of_series_is_bounded_and_no_count_is_lost() -> None:
    counter = Counter("thaw_things", "Things.", ("a", "b"), max_series=3)
    for number in range(10):
        counter.add((f"{number}", "1"))
    counter.add(("0", "1"))
    found = read(counter)
    assert found == {("0", "1"): 2.0, ("1", "1"): 1.0, ("2", "1"): 1.0, ("", ""): 7.0}
