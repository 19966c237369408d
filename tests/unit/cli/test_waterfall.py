"""The waterfall has one row for each phase and process.

The critical path is solid, and each stretch of it is on one row only.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from rich.console import Console

from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.traces import RequestTrace
from shared.telemetry.critical_path import critical_path
from thaw.cli.waterfall import OVERLAPPED, WAITED, request_waterfall, rows, whole_ms

RECORDED = Path(__file__).parents[2] / "contract" / "messages" / "v0.1" / "RequestTrace.json"

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


def test_row_times_sum_to_the_ttft() -> None:
    shown = rows(SPANS, CRITICAL, 0, 100, 50)
    assert sum(r.waited_ms for r in shown) == 100
    assert shown[0].phase in ("schedule", "queue")
    assert all(len(r.bar) == 50 for r in shown)
    assert "late" not in {r.process for r in shown}


def test_overlapped_spans_are_light_and_critical_ones_solid() -> None:
    by_process = {r.process: r for r in rows(SPANS, CRITICAL, 0, 100, 50)}
    assert WAITED in by_process["loader"].bar
    assert WAITED not in by_process["nodeagent"].bar
    assert OVERLAPPED in by_process["nodeagent"].bar
    assert by_process["loader"].bar.count(WAITED) == 40


def test_gap_in_the_critical_path_has_its_own_row() -> None:
    spans = (PhaseSpan(phase=Phase.PREFILL, start_ms=50, duration_ms=20, process="engine"),)
    path = critical_path(spans, 0, 100)
    shown = rows(spans, path, 0, 100, 20)
    assert {r.phase for r in shown} == {"queue", "prefill", "mesh"}
    assert sum(r.waited_ms for r in shown) == 100


def test_waterfall_shows_ttft_and_processes() -> None:
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


@pytest.mark.parametrize(("prompt", "expected"), [(24, "24 prompt + 32 output tokens"), (0, "\n32 output tokens")])
def test_uncounted_prompt_tokens_are_not_shown(prompt: int, expected: str) -> None:
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
    assert expected in console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO above


@st.composite
def _span(draw: st.DrawFn) -> PhaseSpan:
    start = draw(st.floats(min_value=-500, max_value=1200))
    return PhaseSpan(
        phase=draw(st.sampled_from([Phase.QUEUE, Phase.MESH, Phase.LOAD, Phase.PREFILL])),
        start_ms=start,
        duration_ms=draw(st.floats(min_value=0, max_value=900)),
        process=draw(st.sampled_from(["gateway", "engine", "loader"])),
    )


def _tiles(trace: RequestTrace) -> None:
    """Check that the rows tile the critical path.

    Every column is solid on some row, no row waits longer than it lasts, and the printed parts sum
    to the printed total. The total is the sum of the row times, rounded: beside a half of a
    millisecond, it and the rounded TTFT can differ by 1, as the sum has a rounding error.
    """
    assert trace.ttft_ms is not None
    shown = rows(trace.spans, trace.critical_path, 0, trace.ttft_ms, 40)
    assert sum(r.waited_ms for r in shown) == pytest.approx(trace.ttft_ms)
    assert all(any(r.bar[column] == WAITED for r in shown) for column in range(40))
    assert all(r.waited_ms <= r.duration_ms + 1e-6 for r in shown)
    console = Console(file=io.StringIO(), width=120)
    console.print(request_waterfall(trace, console))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # it is the StringIO above
    printed = [int(m[1]) for line in lines if (m := re.search(r"^\w.*\d\.\d +(\d+) *$", line))]
    total = next(int(line.split()[-1]) for line in lines if line.startswith("total "))
    assert sum(printed) == total
    assert abs(total - trace.ttft_ms) <= 0.5 + 1e-9


@given(st.lists(_span(), max_size=10), st.floats(min_value=1, max_value=1000))
def test_the_rows_tile_the_time_to_the_first_token(spans: list[PhaseSpan], ttft_ms: float) -> None:
    path = critical_path(spans, 0, ttft_ms)
    trace = RequestTrace(
        request_id="r",
        trace_id="t",
        model="m",
        endpoint="chat",
        received=0,
        ttft_ms=ttft_ms,
        duration_ms=2000,
        spans=tuple(spans),
        critical_path=path,
    )
    _tiles(trace)


def test_rows_of_recorded_traces_tile_the_ttft() -> None:
    recorded = [t for t in TypeAdapter(list[RequestTrace]).validate_json(RECORDED.read_text()) if t.ttft_ms is not None]
    assert recorded
    for trace in recorded:
        path = critical_path(trace.spans, 0.0, trace.ttft_ms or 0.0)
        _tiles(trace.model_copy(update={"critical_path": path}))


def test_leading_wait_is_separate_from_a_later_wait_of_the_same_phase() -> None:
    spans = (
        PhaseSpan(phase=Phase.RESERVE, start_ms=42, duration_ms=122, process="scheduler"),
        PhaseSpan(phase=Phase.QUEUE, start_ms=164, duration_ms=6, process="engine"),
    )
    shown = rows(spans, critical_path(spans, 0, 170), 0, 170, 50)
    assert [(r.phase, r.process, r.start_ms, r.waited_ms) for r in shown] == [
        ("queue", "", 0, 42),
        ("reserve", "scheduler", 42, 122),
        ("queue", "engine", 164, 6),
    ]


def test_rounded_parts_sum_to_the_rounded_total() -> None:
    assert whole_ms([0.4, 0.4, 0.45, 10.3]) == [1, 0, 1, 10]
    assert whole_ms([]) == []
