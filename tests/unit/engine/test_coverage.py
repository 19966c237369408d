"""The set of bytes that have arrived."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.engine.domain.coverage import Coverage

SIZE = 40
RANGES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=12)


@given(RANGES, st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted))
def test_has_exactly_the_bytes_that_were_added(added: list[list[int]], asked: list[int]) -> None:
    coverage, there = Coverage(), set()
    for start, end in added:
        coverage.add(start, end)
        there |= set(range(start, end))
    assert coverage.has(*asked) == (set(range(*asked)) <= there)
