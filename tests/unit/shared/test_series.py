"""Counters and histograms by labels, as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from shared.telemetry.series import Counter, Histogram


def render(*collectors: Counter | Histogram) -> list[str]:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    text: str = generate_latest(registry).decode()
    return text.splitlines()


def test_sums_by_labels_in_the_order_of_their_names() -> None:
    counter = Counter("thaw.starts", "Starts.", "seconds")
    counter.add(1, {"thaw.way": "load", "gen_ai.request.model": "m"})
    counter.add(0.5, {"gen_ai.request.model": "m", "thaw.way": "load"})
    counter.add(0, {"gen_ai.request.model": "n"})
    assert render(counter) == [
        "# HELP thaw_starts_seconds_total Starts.",
        "# TYPE thaw_starts_seconds_total counter",
        'thaw_starts_seconds_total{gen_ai_request_model="m",thaw_way="load"} 1.5',
        'thaw_starts_seconds_total{gen_ai_request_model="n",thaw_way=""} 0.0',
    ]


def test_buckets_count_observations_up_to_their_bound() -> None:
    histogram = Histogram("thaw.took", "Time.", "seconds", (0.5, 1))
    for value in (0.5, 0.7, 1.0, 3.0):
        histogram.record(value, {"a": "b"})
    assert render(histogram)[2:] == [
        'thaw_took_seconds_bucket{a="b",le="0.5"} 1.0',
        'thaw_took_seconds_bucket{a="b",le="1"} 3.0',
        'thaw_took_seconds_bucket{a="b",le="+Inf"} 4.0',
        'thaw_took_seconds_count{a="b"} 4.0',
        'thaw_took_seconds_sum{a="b"} 5.2',
    ]


def test_metric_without_values_is_not_exported() -> None:
    assert render(Counter("thaw.starts", "Starts."), Histogram("thaw.took", "Time.", "seconds", (1,))) == []


def test_labels_that_were_recorded_the_longest_ago_are_dropped() -> None:
    counter, histogram = Counter("c", "C.", most=2), Histogram("h", "H.", "", (1,), most=2)
    for name in "aba" + "c":
        counter.add(1, {"n": name})
        histogram.record(1, {"n": name})
    lines = render(counter, histogram)
    assert [line for line in lines if line.startswith("c_total{")] == ['c_total{n="a"} 2.0', 'c_total{n="c"} 1.0']
    assert [line for line in lines if line.startswith("h_count{")] == ['h_count{n="a"} 2.0', 'h_count{n="c"} 1.0']
