"""The gateway's own histogram, and what the gateway records with it."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from services.gateway.telemetry.histogram import Histogram
from services.gateway.telemetry.metrics import Metrics
from shared.contracts.traces import RequestTrace

TRACE = "0af7651916cd43dd8448eb211c80319c"
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def samples(text: str, name: str) -> dict[tuple[str, ...], tuple[float, Any]]:
    """Return value and exemplar of each sample of a name, by its label values (sorted by label)."""
    families = text_string_to_metric_families(text)
    found = (s for family in families for s in family.samples if s.name == name)
    return {tuple(value for _, value in sorted(s.labels.items())): (s.value, s.exemplar) for s in found}


def exported(histogram: Histogram) -> str:
    registry = CollectorRegistry()
    registry.register(histogram)
    return str(generate_latest(registry).decode())


def test_observations_are_cumulative_up_to_and_with_their_bounds() -> None:
    histogram = Histogram("a_seconds", "text", ("model",), (0.1, 1))
    for observed in (0.05, 0.1, 0.5, 7.0):
        histogram.record(("m",), observed)
    text = exported(histogram)
    assert {key[0]: value for key, (value, _) in samples(text, "a_seconds_bucket").items()} == {"0.1": 2, "1.0": 3, "+Inf": 4}
    assert samples(text, "a_seconds_sum")["m",][0] == pytest.approx(7.65)
    assert samples(text, "a_seconds_count")["m",][0] == 4


def test_each_bucket_has_the_last_trace_that_explains_it() -> None:
    histogram = Histogram("a_seconds", "text", (), (0.1, 1))
    for observed, trace_id in ((0.2, "first"), (0.3, TRACE), (0.4, ""), (9.0, "slow")):
        histogram.record((), observed, trace_id)
    found = {key[0]: exemplar for key, (_, exemplar) in samples(exported(histogram), "a_seconds_bucket").items()}
    assert found["0.1"] is None
    assert (found["1.0"].labels, found["1.0"].value) == ({"trace_id": TRACE}, 0.3)
    assert found["+Inf"].labels == {"trace_id": "slow"}
    assert 0 < float(found["1.0"].timestamp) <= float(found["+Inf"].timestamp)


def test_series_are_bounded_and_no_observation_is_lost() -> None:
    histogram = Histogram("a_seconds", "text", ("model",), (1,), max_series=2)
    for model in ("a", "b", "c", "d", "a"):
        histogram.record((model,), 0.5)
    assert {key[0]: value for key, (value, _) in samples(exported(histogram), "a_seconds_count").items()} == {"a": 2, "b": 1, "": 2}


def traced(*, cold: bool, **phases: float) -> RequestTrace:
    path = [{"phase": phase, "start_ms": 0, "duration_ms": ms} for phase, ms in phases.items()]
    given = {"request_id": "r", "trace_id": TRACE, "model": "m", "endpoint": "chat", "received": 0, "duration_ms": 9_000}
    return RequestTrace.model_validate({**given, "cold": cold, "ttft_ms": sum(phases.values()), "critical_path": path})


def test_times_to_the_first_token_are_recorded_by_phase_cold_and_warm_apart() -> None:
    metrics = Metrics()
    metrics.record_ttft(traced(cold=True, load=2_000, prefill=500), is_sampled=True)
    metrics.record_ttft(traced(cold=False, prefill=40), is_sampled=True)
    rendered, content_type = metrics.render(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    text = rendered.decode()
    whole = samples(text, "gen_ai_server_time_to_first_token_seconds_sum")
    assert {key: value for key, (value, _) in whole.items()} == {
        ("chat", "thaw", "m", "true"): 2.5,
        ("chat", "thaw", "m", "false"): 0.04,
    }
    parts = {key: value for key, (value, _) in samples(text, "thaw_ttft_phase_seconds_sum").items()}
    assert parts == {("m", "true", "load"): 2.0, ("m", "true", "prefill"): 0.5, ("m", "false", "prefill"): 0.04}
    buckets = samples(text, "gen_ai_server_time_to_first_token_seconds_bucket")
    exemplars = [e for _, e in buckets.values() if e is not None]
    assert [(e.labels["trace_id"], e.value) for e in exemplars] == [(TRACE, 2.5), (TRACE, 0.04)]


def test_no_exemplar_names_a_trace_that_is_not_exported() -> None:
    metrics = Metrics()
    metrics.record_ttft(traced(cold=False, prefill=40), is_sampled=False)
    assert TRACE not in metrics.render(OPENMETRICS)[0].decode()


def test_request_without_a_first_token_is_not_recorded() -> None:
    metrics = Metrics()
    metrics.record_ttft(traced(cold=False).model_copy(update={"ttft_ms": None}), is_sampled=True)
    assert "time_to_first_token_seconds_count" not in metrics.render()[0].decode()


def test_text_without_exemplars_is_the_default() -> None:
    metrics = Metrics()
    metrics.record_ttft(traced(cold=False, prefill=40), is_sampled=True)
    rendered, content_type = metrics.render("*/*")
    assert content_type.startswith("text/plain")
    assert TRACE not in rendered.decode()
    assert "# EOF" not in rendered.decode()
