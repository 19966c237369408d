"""Percentiles by the nearest rank."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.percentiles import nearest_rank, percentile


@pytest.mark.parametrize(
    ("count", "percent", "expected"),
    [
        (2, 50, 1),
        (4, 50, 2),
        (5, 50, 3),
        (20, 5, 1),
        (20, 95, 19),
        (100, 99, 99),
        (101, 99, 100),
        (200, 95, 190),
        (1000, 99.9, 999),
        (7, 0, 1),
        (7, 100, 7),
    ],
)
def test_percentile_of_the_first_numbers_is_its_rank(count: int, percent: float, expected: int) -> None:
    assert nearest_rank(count, percent) == expected
    assert percentile(range(count, 0, -1), percent) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_percentile_is_the_least_value_that_the_share_does_not_exceed(values: list[float], percent: int) -> None:
    found = percentile(values, percent)
    assert found in values
    assert 100 * sum(v <= found for v in values) >= percent * len(values)
    assert 100 * sum(v < found for v in values) < percent * len(values)


def test_percentile_without_values_is_nan_or_the_default() -> None:
    assert math.isnan(percentile([], 50))
    assert percentile([], 50, default=None) is None
    assert percentile([], 50, default=0.0) == 0.0
