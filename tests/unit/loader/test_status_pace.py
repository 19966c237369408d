"""The pace of a loader's statuses while something changes."""

from __future__ import annotations

import pytest

from services.loader.app import between_statuses_s


@pytest.mark.parametrize(("took_s", "pause_s"), [(0.0, 0.05), (0.001, 0.05), (0.004, 0.2), (1.0, 0.5)])
def test_large_statuses_take_two_percent_of_the_time_but_are_half_a_second_apart_at_most(took_s: float, pause_s: float) -> None:
    assert between_statuses_s(took_s) == pytest.approx(pause_s)
