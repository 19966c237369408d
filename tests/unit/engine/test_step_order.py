"""The order in which models share a device."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.engine.domain.step_order import LEAD_S, Lane, admit, charge, next_lane


def test_lane_with_least_compute_time_goes_first() -> None:
    assert next_lane([Lane("a", 2.0), Lane("b", 1.0), Lane("c", 3.0)], now=0.0).name == "b"


def test_earliest_deadline_goes_before_lanes_without_one() -> None:
    lanes = [Lane("none", 0.0), Lane("late", 0.1, deadline=9.0), Lane("soon", 0.2, deadline=5.0)]
    assert next_lane(lanes, now=1.0).name == "soon"


def test_deadline_that_has_passed_gives_no_precedence() -> None:
    assert next_lane([Lane("fair", 0.0), Lane("missed", 0.1, deadline=5.0)], now=5.1).name == "fair"


def test_deadlines_do_not_take_more_than_the_lead() -> None:
    assert next_lane([Lane("fair", 1.0), Lane("urgent", 1.0 + LEAD_S, deadline=9.0)], now=0.0).name == "urgent"
    assert next_lane([Lane("fair", 1.0), Lane("urgent", 1.01 + LEAD_S, deadline=9.0)], now=0.0).name == "fair"


def test_idle_time_is_not_saved_up() -> None:
    busy = [Lane("b", 7.0), Lane("c", 8.0)]
    assert admit(Lane("a", 1.0), busy, 7.5).tag_s == 7.0
    assert admit(Lane("a", 1.0), [], 7.5).tag_s == 7.5
    assert admit(Lane("a", 9.0), busy, 7.5).tag_s == 9.0


@given(
    durations=st.lists(st.floats(0.001, 2.0), min_size=2, max_size=6),
    with_deadline=st.lists(st.booleans(), min_size=6, max_size=6),
    steps=st.integers(1, 120),
)
def test_busy_lane_waits_for_a_bounded_compute_time_of_each_other(
    durations: list[float], with_deadline: list[bool], steps: int
) -> None:
    """Lane 0 has no objective. The others are always busy, with any step lengths and deadlines."""
    lanes = {f"{i}": Lane(f"{i}", deadline=1e9 if i and with_deadline[i] else None) for i in range(len(durations))}
    waited = dict.fromkeys(lanes, 0.0)
    for _ in range(steps):
        name = next_lane(lanes.values(), now=0.0).name
        took = durations[int(name)]
        lanes[name] = charge(lanes[name], took)
        waited[name] += took
        if name == "0":
            waited = dict.fromkeys(lanes, 0.0)
        for other, duration in enumerate(durations[1:], 1):
            assert waited[f"{other}"] <= durations[0] + LEAD_S + 2 * duration + 1e-9


@given(st.lists(st.tuples(st.floats(0, 10), st.one_of(st.none(), st.floats(0, 10))), min_size=1, max_size=8), st.floats(0, 10))
def test_choice_does_not_depend_on_the_order_of_the_lanes(found: list[tuple[float, float | None]], now: float) -> None:
    lanes = [Lane(f"{i}", tag, deadline) for i, (tag, deadline) in enumerate(found)]
    assert next_lane(lanes, now) == next_lane(lanes[::-1], now)
