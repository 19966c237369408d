"""The waterfall: one row a phase and process, the critical path solid, every stretch of it on one row only."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.traces import RequestTrace
from shared.telemetry.critical_path import critical_path
from thaw.cli.waterfall import OVERLAPPED, WAITED, request_waterfall, rows

SPANS = (
    PhaseSpan(phase=Phase.SCHEDULE, start_ms=0, duration_ms=10, process="scheduler"),
    PhaseSpan(phase=Phase.CONTAINER, start_ms=10, duration_ms=50, process="nodeagent"),
    PhaseSpan(phase=Phase.LOAD, start_ms=10, duration_ms=80, process="loader"),
    PhaseSpan(phase=Phase.QUEUE, start_ms=90, duration_ms=5, process="engine"),
    PhaseSpan(phase=Phase.QUEUE, start_ms=0, duration_ms=1, process="gateway"),
    PhaseSpan(phase=Phase.PREFILL, start_ms=95, duration_ms=5, process="engine"),
    PhaseSpan(phase=Phase.PREFILL, start_ms=500, duration_ms=5, process="late"),
)
CRITICAL = critical_path(SPANS, 0, 100)


def test_waited_times_sum_to_the_whole() -> None:
    shown = rows(SPANS, CRITICAL, 0, 100, 50)
    assert sum(r.waited_ms for r in shown) == 100
    assert shown[0].phase in ("schedule", "queue")
    assert all(len(r.bar) == 50 for r in shown)
    assert "late" not in {r.process for r in shown}


def test_what_overlaps_is_light_and_what_is_waited_for_solid() -> None:
    by_process = {r.process: r for r in rows(SPANS, CRITICAL, 0, 100, 50)}
    assert WAITED in by_process["loader"].bar
    assert WAITED not in by_process["nodeagent"].bar
    assert OVERLAPPED in by_process["nodeagent"].bar
    assert by_process["loader"].bar.count(WAITED) == 40


def test_a_gap_of_the_path_has_a_row_of_its_own() -> None:
    spans = (PhaseSpan(phase=Phase.PREFILL, start_ms=50, duration_ms=20, process="engine"),)
    path = critical_path(spans, 0, 100)
    shown = rows(spans, path, 0, 100, 20)
    assert {r.phase for r in shown} == {"queue", "prefill", "mesh"}
    assert sum(r.waited_ms for r in shown) == 100


def test_it_prints() -> None:
    trace = RequestTrace(
        request_id="r",
        trace_id="t",
        model="m",
        endpoint="chat",
        received=0,
        ttft_ms=100,
        duration_ms=200,
        spans=SPANS,
        critical_path=CRITICAL,
    )
    console = Console(file=io.StringIO(), width=120)
    console.print(request_waterfall(trace, console))
    text = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO above
    assert "TTFT 100 ms" in text
    assert "loader" in text


@pytest.mark.parametrize(("prompt", "told"), [(24, "24 prompt + 32 output tokens"), (0, "\n32 output tokens")])
def test_a_prompt_that_the_engine_did_not_count_is_not_told(prompt: int, told: str) -> None:
    trace = RequestTrace(
        request_id="r",
        trace_id="t",
        model="m",
        endpoint="chat",
        received=0,
        ttft_ms=100,
        duration_ms=200,
        spans=SPANS,
        critical_path=CRITICAL,
        prompt_tokens=prompt,
        completion_tokens=32,
    )
    console = Console(file=io.StringIO(), width=120)
    console.print(request_waterfall(trace, console))
    assert told in console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO above
