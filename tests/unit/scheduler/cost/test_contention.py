"""Fetches that share a link: HydraServe's Eq. 3 and 4."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.domain.cost.contention import PendingFetch, finish_times, late_fetches, meets_eq_3, pending_now

B = 100.0
fetch = st.builds(PendingFetch, st.floats(1.0, 1e4), st.one_of(st.just(math.inf), st.floats(-10.0, 1e3)))
fetches = st.lists(fetch, max_size=5)


def test_fetches_that_share_equally_end_in_order_of_their_bytes() -> None:
    assert finish_times([300.0, 100.0], B) == [4.0, 2.0]
    assert finish_times([100.0, 100.0, 100.0], B) == [3.0, 3.0, 3.0]
    assert finish_times([], B) == []


def test_pending_bytes_fall_by_the_share_of_the_link() -> None:
    assert pending_now(300.0, B, 2, 2.0) == 200.0
    assert pending_now(300.0, B, 1, 10.0) == 0.0


def test_fetch_that_the_newcomer_delays_beyond_its_deadline_is_named() -> None:
    pending = [PendingFetch(200.0, 3.0), PendingFetch(200.0), PendingFetch(50.0, 4.0)]
    assert late_fetches(pending[:1], 1000.0, B) == [0], "alone it takes 2 s, with another one 4 s"
    assert late_fetches(pending[1:2], 1000.0, B) == [], "it has no objective"
    assert late_fetches(pending[2:], 1000.0, B) == [], "it meets its objective either way"


def test_small_fetch_is_accepted_where_a_large_one_is_not() -> None:
    pending = [PendingFetch(200.0, 3.0)]
    assert late_fetches(pending, 101.0, B) == [0]
    assert late_fetches(pending, 100.0, B) == []


def test_fetch_that_is_late_anyway_refuses_none() -> None:
    assert late_fetches([PendingFetch(200.0, 1.0)], 1000.0, B) == []


@given(fetches, st.floats(1.0, 1e4))
def test_newcomer_that_eq_3_accepts_makes_no_fetch_late(pending: list[PendingFetch], nbytes: float) -> None:
    if meets_eq_3(pending, B):
        assert not [
            i for i in late_fetches(pending, nbytes, B) if pending[i].left_s > 1.000001 * pending[i].nbytes * (len(pending) + 1) / B
        ]


@given(fetches, st.floats(1.0, 1e4), st.floats(0.0, 1.0))
def test_smaller_newcomer_makes_no_other_fetch_late(pending: list[PendingFetch], nbytes: float, part: float) -> None:
    before = finish_times([f.nbytes for f in pending], B)
    for i in late_fetches(pending, part * nbytes, B):
        after = finish_times([*(f.nbytes for f in pending), nbytes], B)
        assert after[i] >= pending[i].left_s - 1e-9 * after[i]
        assert after[i] >= before[i]


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=6))
def test_link_is_never_idle_before_the_last_fetch_ends(sizes: list[float]) -> None:
    times = finish_times(sizes, B)
    assert max(times) == pytest.approx(sum(sizes) / B)
    assert all(t >= n / B - 1e-9 for t, n in zip(times, sizes, strict=True))
