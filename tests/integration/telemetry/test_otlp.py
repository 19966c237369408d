"""Spans reach a real OTLP receiver over both protocols.

Phases have their times under their parent.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.otlp import OtlpReceiver

PROGRAM = """
from shared.contracts.phases import Phase, PhaseSpan
from shared.settings import CommonSettings
from shared.telemetry import tracing

tracing.setup_tracing(CommonSettings(), "scheduler")
with tracing.tracer.start_as_current_span("load demo") as load:
    parent = tracing.traceparent(load)
    headers = tracing.carry()
with tracing.carried(headers), tracing.tracer.start_as_current_span("chat demo", links=[tracing.link_to(parent)]):
    spans = [PhaseSpan(phase=Phase.LOAD, start_ms=-50, duration_ms=40, detail={"bytes": 12})]
    tracing.record_phases(spans, tracing.context_of(parent))
tracing.shutdown_tracing()
"""


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_spans_reach_the_collector_by_each_protocol(receiver: OtlpReceiver, protocol: str) -> None:
    endpoint = receiver.grpc_url if protocol == "grpc" else receiver.http_url
    # A process of its own: a tracer provider can be installed once in a process.
    environment = {**os.environ, "THAW_OTLP_ENDPOINT": endpoint, "THAW_OTLP_PROTOCOL": protocol}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=60)
    load, chat, phase = receiver.wait_for("load demo"), receiver.wait_for("chat demo"), receiver.wait_for("load")
    assert chat.links[0].span_id == load.span_id
    assert chat.parent_span_id == load.span_id
    assert phase.parent_span_id == load.span_id
    assert phase.trace_id == load.trace_id
    assert phase.end_time_unix_nano - phase.start_time_unix_nano == 40_000_000
    assert {service for service, _ in receiver.spans} == {"thaw-scheduler"}
