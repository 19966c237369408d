"""The figures that bench.pipeline makes of a client's tokens."""

from __future__ import annotations

from collections import defaultdict

import pytest

from bench.moving import Timed, Values
from bench.pipeline import AFTER, _note, goals
from bench.pipeline_tpot import SETTLED, SINGLE, add_ratios, tpot_ms


def stream(before_ms: float, pause_ms: float, after_ms: float, moved_at: int) -> Timed:
    """Return a stream whose tokens pause once, when the request has moved."""
    at = [n * before_ms / 1e3 for n in range(moved_at)]
    at += [at[-1] + pause_ms / 1e3 + n * after_ms / 1e3 for n in range(AFTER + 50)]
    return Timed("", {}, at=at)


def test_gap_is_the_pause_of_the_switch() -> None:
    figures: Values = defaultdict(list)
    found = stream(20.0, 90.0, 10.0, moved_at=100)
    _note(found, began=found.at[80], moved_at=100, gateway_ms=70.0, figures=figures)
    assert figures["consolidation.gap_ms"] == [pytest.approx(90.0)]
    assert figures["consolidation.before_ms"] == [pytest.approx(20.0)]
    assert figures["consolidation.after_ms"] == [pytest.approx(10.0)]
    assert figures["consolidation.tokens"] == [100]


def test_gap_covers_the_time_in_which_the_destination_computes_ahead() -> None:
    figures: Values = defaultdict(list)
    found = stream(20.0, 25.0, 10.0, moved_at=100)
    found.at[90:] = [t + 0.2 for t in found.at[90:]]
    _note(found, began=found.at[80], moved_at=100, gateway_ms=5.0, figures=figures)
    assert figures["consolidation.gap_ms"] == [pytest.approx(220.0)]


def test_pauses_before_the_migration_are_not_its_own() -> None:
    figures: Values = defaultdict(list)
    found = stream(20.0, 30.0, 10.0, moved_at=100)
    found.at[SETTLED + 5 :] = [t + 1.0 for t in found.at[SETTLED + 5 :]]
    _note(found, began=found.at[80], moved_at=100, gateway_ms=5.0, figures=figures)
    assert figures["consolidation.gap_ms"] == [pytest.approx(30.0)]


def test_goals_are_printed_for_what_was_measured() -> None:
    assert goals({}) == []
    lines = goals(
        {
            "s1.ttft_ms": [8000.0],
            "s4.ttft_ms": [2400.0],
            "s1.tpot_ms": [10.0],
            "s4.tpot_ms": [15.0],
            "consolidation.gap_ms": [80.0],
            "consolidation.before_ms": [12.0],
            "consolidation.after_ms": [11.0],
        }
    )
    assert [line.split(": ")[1].split(" ")[0] for line in lines] == ["0.30", "1.50", "80", "0.92"]
    assert "at most 124 ms" in lines[2]


def test_time_per_token_is_the_median() -> None:
    assert tpot_ms([0.0, 0.01, 0.02, 0.5, 0.51]) == pytest.approx(10.0)


def test_ratios_of_the_time_per_token_are_those_of_one_round() -> None:
    figures: Values = defaultdict(list)
    # The machine is half as fast in the second round: no ratio changes.
    for speed in (1.0, 2.0):
        for name, ms, cpu_ms in ((SINGLE, 20.0, 30.0), ("4 stages", 23.0, 36.0)):
            figures[f"tpot.{name}.ms"].append(ms * speed)
            figures[f"tpot.{name}.cpu_ms"].append(cpu_ms * speed)
    add_ratios(figures)
    assert figures["tpot.4 stages.ratio"] == [pytest.approx(1.15)] * 2
    assert figures["tpot.4 stages.cpu_ratio"] == [pytest.approx(1.2)] * 2
    assert f"tpot.{SINGLE}.ratio" not in figures
    [line] = goals(figures)
    assert "4 stages by one engine, paired: 1.15 (1.15 to 1.15)" in line
