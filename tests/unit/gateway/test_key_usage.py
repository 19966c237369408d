"""Usage by key and model in the metrics: sums since the gateway started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.gateway.domain.usage_records import UsageRecord
from services.gateway.telemetry.metrics import Metrics

RECORD = UsageRecord(1, "alice", "m", "", False, 10, 4, 3)


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    metrics = Metrics()
    yield metrics
    metrics.close()


def counters(metrics: Metrics) -> dict[str, float]:
    """Return what was exported by key; without the names of the labels' families."""
    lines = [line for line in metrics.render()[0].decode().splitlines() if line.startswith("thaw_key_")]
    return {name.removeprefix("thaw_key_"): float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_sums_grow_with_every_record_however_often_they_are_exported(metrics: Metrics) -> None:
    label = 'gen_ai_request_model="m"'
    for times in (1, 2):
        metrics.key_usage.add([RECORD])
        assert counters(metrics) == counters(metrics)
        assert counters(metrics) == {
            f'requests_total{{{label},thaw_key="alice"}}': times,
            f'tokens_total{{{label},gen_ai_token_type="input",thaw_key="alice"}}': 10 * times,
            f'tokens_total{{{label},gen_ai_token_type="output",thaw_key="alice"}}': 3 * times,
        }


def test_keys_models_adapters_and_device_kinds_are_apart(metrics: Metrics) -> None:
    for record in (
        replace(RECORD, compute_us=250_000, compute_kind="cpu"),
        replace(RECORD, compute_us=500_000, compute_kind="cuda"),
        replace(RECORD, adapter="lora", plan_id="p"),
        replace(RECORD, key="bob", prompt_tokens=0, completion_tokens=0),
    ):
        metrics.key_usage.add([record])
    found = counters(metrics)
    assert found['requests_total{gen_ai_request_model="m",thaw_key="alice"}'] == 2
    assert found['requests_total{gen_ai_request_model="lora",thaw_key="alice"}'] == 1
    assert found['cold_requests_total{gen_ai_request_model="lora",thaw_key="alice"}'] == 1
    assert found['compute_seconds_total{gen_ai_request_model="m",thaw_device_kind="cpu",thaw_key="alice"}'] == 0.25
    assert found['compute_seconds_total{gen_ai_request_model="m",thaw_device_kind="cuda",thaw_key="alice"}'] == 0.5
    assert [name for name in found if "bob" in name] == ['requests_total{gen_ai_request_model="m",thaw_key="bob"}']
