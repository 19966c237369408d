"""The requests of `thaw demo traffic`, and its summary."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from thaw.cli.traffic import Outcome, draw_arrivals, summarize


def test_arrivals_have_the_rate_and_popularity_that_are_asked_for() -> None:
    arrivals = draw_arrivals(random.Random(1), 1000, 5, 10)
    assert len(arrivals) == pytest.approx(5000, rel=0.1)
    assert [a.at_s for a in arrivals] == sorted(a.at_s for a in arrivals)
    assert arrivals[0].at_s >= 0
    assert arrivals[-1].at_s < 1000
    counts = Counter(a.model for a in arrivals)
    assert set(counts) == set(range(10))
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.2)
    assert draw_arrivals(random.Random(1), 1000, 5, 10) == arrivals
    assert draw_arrivals(random.Random(2), 1000, 5, 10) != arrivals


def test_summary_separates_cold_warm_and_failed_requests() -> None:
    outcomes = [
        Outcome("a", None, 10.0, 5, False),
        Outcome("a", None, 30.0, 5, False),
        Outcome("a", None, 900.0, 5, True),
        Outcome("b", None, 40.0, 5, None),
        Outcome("b", "too_many_requests"),
    ]
    summary = summarize(["a", "b", "c"], outcomes, 4.0)
    assert {k: summary[k] for k in ("ok", "requests", "failed", "cold", "tokens", "tokens_per_second", "errors")} == {
        "ok": True,
        "requests": 5,
        "failed": 1,
        "cold": 1,
        "tokens": 20,
        "tokens_per_second": 5.0,
        "errors": {"too_many_requests": 1},
    }
    a, b, c = summary["models"]
    assert (a["requests"], a["warm_ttft_ms"], a["cold_ttft_ms"]) == (3, 20.0, 900.0)
    assert (b["requests"], b["failed"], b["warm_ttft_ms"]) == (2, 1, None)
    assert c["requests"] == 0


def test_run_whose_requests_all_fail_is_a_failure() -> None:
    assert summarize(["a"], [Outcome("a", "not_running")], 1.0)["ok"] is False
    assert summarize(["a"], [], 1.0)["ok"] is True
