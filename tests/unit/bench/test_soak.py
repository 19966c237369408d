"""Slopes, bounds and verdicts of the soak, on series with known truth."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench.soak import Row, bound_of, rows_of, tenths
from bench.soak_age import Pair, ratios
from bench.soak_load import MALFORMED, STREAMED, SWAP, SentRequest
from bench.trend import Trend, theil_sen
from thaw.launcher.logfiles import LIMIT_BYTES
from thaw.launcher.servers import NATS_MEMORY_BYTES

LIMITS = {"memory": 24e9, "disk": 1e11, "shm": 24e9, "fds": 1e6, "pids": 4e6, "inodes": 1e7}


def samples(**series: list[float]) -> list[dict[str, Any]]:
    """Return one census a minute of each metric; `__` stands for the bar."""
    count = len(next(iter(series.values())))
    return [
        {"at_s": 60.0 * i, "census": {k.replace("__", "|"): v[i] for k, v in series.items()}, "bounds": {}} for i in range(count)
    ]


def test_slope_of_a_straight_line_is_exact() -> None:
    trend = theil_sen([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [5 + 3 * t for t in range(10)])
    assert (trend.slope, trend.low, trend.high) == (3, 3, 3)
    assert trend.rises


def test_one_outlier_does_not_change_the_slope() -> None:
    values = [2.0 * t for t in range(20)]
    values[7] = 1e9
    assert theil_sen(range(20), values).slope == 2


def test_noise_without_a_slope_is_level_and_a_slope_under_noise_is_found() -> None:
    draw = random.Random(1)
    noise = [draw.gauss(0, 10) for _ in range(200)]
    assert not theil_sen(range(200), noise).rises
    trend = theil_sen(range(200), [n + t for t, n in enumerate(noise)])
    assert trend.rises
    assert trend.low < 1 < trend.high


def test_random_walk_is_less_certain_than_noise_of_its_size() -> None:
    """A random walk's slope is less certain than that of noise of the same size.

    Neighbouring samples correlate, so they carry less information. An interval that ignored that
    would report a slope for most walks.
    """
    called = 0
    for seed in range(20):
        draw, at, walk = random.Random(seed), 0.0, []
        for _ in range(120):
            at = 0.9 * at + draw.gauss(0, 1)
            walk.append(at)
        called += theil_sen(range(120), walk).rises
    assert called <= 2


@pytest.mark.parametrize("count", [0, 7])
def test_too_few_samples_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="8 samples or more"):
        theil_sen(range(count), [0.0] * count)


def test_verdict_follows_from_slope_and_limit() -> None:
    level, slow, fast = Trend(0.0, -1.0, 1.0), Trend(1e6, 5e5, 2e6), Trend(1e8, 9e7, 2e8)
    verdicts = [Row("gateway", "private_bytes", 5e7, 6e7, t, 24e9, None).verdict for t in (level, slow, fast)]
    assert verdicts == ["level", "fits", "FILLS"]
    assert Row("stream X", "bytes", 5e7, 6e7, fast, 24e9, 2.5e8).verdict == "fits"


def test_warm_up_is_omitted_and_rare_metrics_have_no_row() -> None:
    grows_then_rests = [float(min(i, 9)) for i in range(121)]
    found = samples(gateway__fds=grows_then_rests, load__streamed=grows_then_rests)
    found[50]["census"]["others|fds"] = 3.0
    (row,) = rows_of(found, LIMITS)
    assert (row.name, row.metric, row.verdict, row.first, row.last) == ("gateway", "fds", "level", 9, 9)


def test_cache_that_fills_and_stops_is_level_in_the_second_half() -> None:
    fills_then_rests = [1e6 * min(i, 60) for i in range(121)]
    (row,) = rows_of(samples(migrator__private_bytes=fills_then_rests), LIMITS)
    assert row.trend.slope > 0
    assert row.late is not None
    assert row.late.slope == 0


def test_logs_are_bounded_including_the_rotated_file() -> None:
    sample = {"census": {"log of gateway|bytes": 1.0, "log of nats|bytes": 1.0}, "bounds": {}}
    assert bound_of("directory logs", "bytes", Trend(1, 1, 1), sample) == 4 * LIMIT_BYTES
    assert bound_of("log of nats", "bytes", Trend(1, 1, 1), sample) == LIMIT_BYTES


def test_limits_of_a_stream_bound_its_month() -> None:
    sample = {
        "census": {"stream T|bytes": 1000.0, "stream T|messages": 10.0},
        "bounds": {"stream T|max_messages": 50.0, "stream T|max_age_s": 36_000.0, "stream U|max_bytes": 1.0},
    }
    assert bound_of("stream T", "messages", Trend(1000, 999, 1001), sample) == 50
    assert bound_of("stream T", "bytes", Trend(1e9, 9e8, 2e9), sample) == 5000
    assert bound_of("stream T", "messages", Trend(2, 1, 3), sample) == 20  # ten hours of them
    assert bound_of("gateway", "fds", Trend(1, 1, 1), sample) is None


def test_tenths_compare_warm_with_warm_and_cold_with_cold() -> None:
    found = samples(machine__load=[1.0] * 61 + [3.0] * 60)
    asked = [
        {"at_s": float(t), "ttft_ms": 10.0 if t < 3600 else 20.0, "cold": t % 100 == 0, "lost": None} for t in range(0, 7200, 10)
    ]
    warm_first, warm_last = tenths(found, asked)["warm"]
    cold_first, cold_last = tenths(found, asked)["cold"]
    assert (warm_first.p99_ms, warm_last.p99_ms) == (10, 20)
    assert (warm_first.load_average, warm_last.load_average) == (1, 3)
    assert warm_first.requests + cold_first.requests == 66
    assert cold_first.requests == 7
    assert cold_last.requests == 6


def test_sum_of_all_processes_is_bounded_by_their_bounds() -> None:
    def census(at: int) -> dict[str, float]:
        nats, gateway = 1e7 * at, 1e6 * at
        return {"nats|private_bytes": nats, "gateway|private_bytes": gateway, "mesh|private_bytes": nats + gateway}

    counted = [{"at_s": 3600.0 * at, "census": census(at), "bounds": {}} for at in range(1, 40)]
    rows = {row.name: row for row in rows_of(counted, LIMITS)}
    assert rows["nats"].month == max(NATS_MEMORY_BYTES, rows["nats"].last)
    assert rows["mesh"].month == max(rows["nats"].month + rows["gateway"].month, rows["mesh"].last)


def _pairs(old_over_new: float, decks: int = 40) -> list[Pair]:
    generator = random.Random(3)

    def sent(kind: str, ttft_ms: float | None) -> SentRequest:
        return SentRequest(0.0, kind, "m", ttft_ms=ttft_ms)

    pairs = []
    for deck in range(decks):
        for kind, ms in ((STREAMED, 10.0), (STREAMED, 10.0), (SWAP, 100.0), (MALFORMED, None)):
            new = None if ms is None else ms * generator.uniform(0.9, 1.1)
            old = None if ms is None else ms * generator.uniform(0.9, 1.1) * old_over_new
            pairs.append(Pair(deck, kind, sent(kind, old), sent(kind, new)))
    return pairs


@pytest.mark.parametrize("old_over_new", [1.0, 1.5])
def test_the_comparison_with_a_new_mesh_finds_the_ratio(old_over_new: float) -> None:
    found = {r.name: r for r in ratios(_pairs(old_over_new))}
    assert set(found) == {"warm p50", "warm p99", "cold p50", "cold p99"}
    assert (found["warm p50"].requests, found["cold p50"].requests) == (80, 40)
    for ratio in found.values():
        assert ratio.low <= old_over_new <= ratio.high, ratio
        assert ratio.high / ratio.low < 1.2, ratio
