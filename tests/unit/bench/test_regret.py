"""The summary of bench.regret."""

from __future__ import annotations

from bench.regret import MEASURES, summary


def test_summary_has_the_percentiles_of_the_ratios_in_any_order() -> None:
    cases = [{"ratios": {m: {"ratio": n / 100, "best": "lru"} for m in MEASURES}} for n in range(200, 0, -1)]
    for row in summary(cases).values():
        assert {p: row[f"p{p}"] for p in (5, 25, 50, 75, 95, 100)} == {5: 0.1, 25: 0.5, 50: 1.0, 75: 1.5, 95: 1.9, 100: 2.0}
        assert (row["ahead_or_equal"], row["best_of_others"]) == (100, {"lru": 200})
