"""bench.fidelity: times of starts that compute while loading, from traces."""

from __future__ import annotations

import pytest

from bench import fidelity_replay
from bench.fidelity_replay import Measured, SeparateDevices, machines
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.traces import RequestTrace

REPLY_MS, PREFILL_MS = 5.0, 200.0


def trace(copied_ms: float, ttft_ms: float) -> RequestTrace:
    """Return a request that caused a start, which was sent after 10 ms."""

    def span(phase: Phase, start: float, end: float, process: str, **detail: str) -> PhaseSpan:
        return PhaseSpan(phase=phase, start_ms=start, duration_ms=end - start, process=process, detail=dict(detail))

    return RequestTrace(
        request_id="r",
        trace_id="t",
        model="m",
        endpoint="chat",
        received=0.0,
        ttft_ms=ttft_ms,
        duration_ms=2 * ttft_ms,
        spans=(
            span(Phase.SCHEDULE, 0, 10, "scheduler"),
            span(Phase.LOAD, 50, 60, "loader"),  # reading
            span(Phase.LOAD, 60, copied_ms, "loader", device="cpu:1"),
            span(Phase.INIT, 111, 161, "engine"),
            span(Phase.QUEUE, 171, 172, "gateway"),
        ),
    )


@pytest.mark.parametrize(
    ("copied_ms", "ttft_ms", "init_s", "more_s"),
    [(900, 955, 0.059, 0.05), (300, 426, 0.059 + 0.05, 0.0)],
    ids=["the copy is longer", "the prompt is longer"],
)
def test_a_start_ends_with_the_copy_or_the_prompt(copied_ms: float, ttft_ms: float, init_s: float, more_s: float) -> None:
    found = fidelity_replay._early_start(trace(copied_ms, ttft_ms), 1.0, REPLY_MS, PREFILL_MS)
    assert (found.engine, found.init, found.warm_up, found.more) == pytest.approx((0.1, init_s, 0.0, more_s))


def test_a_recorded_device_is_replayed_with_its_own_memory() -> None:
    m = Measured(**dict.fromkeys((*Measured.__dataclass_fields__,), 0.1))
    cluster, models = machines(m, SeparateDevices(count=2, weights=10**9, booked=2 * 10**9, device=3 * 10**9))
    (node,) = cluster.nodes
    assert (node.memory, node.devices, node.device_gb) == ("separate", 2, 3.0)
    assert node.links.device == pytest.approx(10.0)
    assert cluster.runtime.capabilities >= {"reuse", "peer_copy"}
    assert {(g.weights_gb, g.kv_gb) for g in models} == {(1.0, 1.0)}
    assert machines(m)[0].nodes[0].memory == "unified"
