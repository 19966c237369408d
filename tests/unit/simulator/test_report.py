"""The figures of an outcome."""

from __future__ import annotations

import pytest

from simulator.report import Outcome, Served


@pytest.mark.parametrize(("requests", "expected"), [(1, (1, 1, 1)), (2, (1, 2, 2)), (20, (10, 19, 20)), (200, (100, 190, 198))])
def test_percentiles_of_an_outcome_are_nearest_ranks(requests: int, expected: tuple[int, int, int]) -> None:
    served = [Served("m", 0.0, float(n), float(n), 0.0, True) for n in range(requests, 0, -1)]
    figures = Outcome(served, prediction_errors=[-1.0, 2.0]).figures()
    for name in ("ttft", "startup"):
        assert tuple(figures[name][p] for p in ("p50", "p95", "p99")) == expected
    assert figures["prediction_error_p50"] == 1.0


def test_an_outcome_without_requests_has_no_percentiles() -> None:
    figures = Outcome().figures()
    assert set(figures["ttft"].values()) == {None}
    assert figures["prediction_error_p50"] is None
