"""The time of a hosted engine, divided among its requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.enginehost.server.busy_time import BusyTime


def test_time_is_divided_equally_among_the_requests_of_each_moment() -> None:
    busy = BusyTime()
    busy.begin("a", 10.0)
    busy.begin("b", 12.0)
    assert busy.of_request("a", 16.0) == pytest.approx(4.0)
    assert busy.end("a", 16.0) == pytest.approx(4.0)
    assert busy.end("b", 17.0) == pytest.approx(3.0)
    assert busy.end("b", 20.0) == 0
    busy.begin("c", 30.0)
    assert busy.end("c", 31.0) == pytest.approx(1.0), "idle time is not charged"


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 100)), max_size=60))
def test_sum_over_requests_is_the_time_with_any_request(events: list[tuple[int, float]]) -> None:
    """Each event begins a request that is not there, and ends one that is."""
    busy, now, expected, charged = BusyTime(), 0.0, 0.0, 0.0
    there: set[str] = set()
    for number, pause in events:
        expected += pause if there else 0.0
        now += pause
        name = str(number)
        if name in there:
            there.remove(name)
            charged += busy.end(name, now)
        else:
            there.add(name)
            busy.begin(name, now)
    in_all = busy.read_total(now)
    charged += sum(busy.end(name, now) for name in there)
    assert charged == pytest.approx(expected, abs=1e-6)
    assert in_all == pytest.approx(expected, abs=1e-6)
