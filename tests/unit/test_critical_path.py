"""The critical path tiles its interval, whatever overlaps."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.phases import Phase, PhaseSpan
from shared.telemetry.critical_path import critical_path

times = st.floats(min_value=-500, max_value=1500, allow_nan=False)


@st.composite
def spans(draw: st.DrawFn) -> PhaseSpan:
    start, end = sorted((draw(times), draw(times)))
    return PhaseSpan(phase=draw(st.sampled_from(Phase)), start_ms=start, duration_ms=end - start)


def span(phase: Phase, start: float, end: float) -> PhaseSpan:
    return PhaseSpan(phase=phase, start_ms=start, duration_ms=end - start)


@given(st.lists(spans(), max_size=12), st.floats(min_value=1, max_value=1000))
def test_critical_path_tiles_the_interval_exactly(given_spans: list[PhaseSpan], end: float) -> None:
    path = critical_path(given_spans, 0, end)
    at = 0.0
    for segment in path:
        assert abs(segment.start_ms - at) < 1e-3
        at = segment.start_ms + segment.duration_ms
    assert abs(at - end) < 1e-3
    assert abs(sum(s.duration_ms for s in path) - end) < 1e-3
    assert all(a.phase != b.phase for a, b in itertools.pairwise(path))


def test_later_of_two_overlapping_phases_is_on_the_critical_path() -> None:
    path = critical_path(
        [
            span(Phase.CONTAINER, 10, 20),
            span(Phase.LOAD, 12, 100),
            span(Phase.INIT, 20, 60),
            span(Phase.PROFILE, 100, 110),
            span(Phase.PREFILL, 112, 130),
        ],
        0,
        131,
    )
    assert [(s.phase, round(s.duration_ms)) for s in path] == [
        (Phase.QUEUE, 10),
        (Phase.CONTAINER, 2),
        (Phase.LOAD, 88),
        (Phase.PROFILE, 10),
        (Phase.MESH, 2),
        (Phase.PREFILL, 18),
        (Phase.MESH, 1),
    ]


def test_interval_without_spans_is_queue_time() -> None:
    assert [s.phase for s in critical_path([], 0, 5)] == [Phase.QUEUE]
