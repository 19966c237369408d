"""Latencies of the last hour: bins, bounds, and sums over gateways."""

from __future__ import annotations

import math
import random

import pytest

from services.gateway.domain.latency_log import LatencyLog, bin_of, phase_bin_of, summarize_history
from shared.contracts.latencies import MAX_BIN, MAX_PHASE_BIN, LatenciesViewed, LatencyHistory, MinuteLatencies
from shared.contracts.phases import Phase
from shared.contracts.traces import CriticalSegment, RequestTrace

NOW = 29_000_000


def trace(ttft_ms: float | None, model: str = "m", *, cold: bool = False, **phases: float) -> RequestTrace:
    path = tuple(CriticalSegment(phase=Phase(name), start_ms=0.0, duration_ms=ms) for name, ms in phases.items())
    fields = {"request_id": "r", "trace_id": "t", "endpoint": "chat", "received": 0.0, "duration_ms": ttft_ms or 0.0}
    return RequestTrace(model=model, ttft_ms=ttft_ms, cold=cold, critical_path=path, **fields)


def history(*logs: LatencyLog, minute: int = NOW, step: int = 5, model: str = "m") -> LatencyHistory:
    views = []
    for n, log in enumerate(logs):
        since, minutes = log.view(model, minute)
        views.append(LatenciesViewed(gateway=f"g{n}", since=since, minutes=minutes))
    return summarize_history(model, views, minute, step)


def test_percentiles_of_several_gateways_are_those_of_all_requests_within_five_percent() -> None:
    generator = random.Random(1)
    logs = [LatencyLog(NOW - 60) for _ in range(3)]
    warm = [math.exp(generator.gauss(3.0, 1.0)) for _ in range(2_000)]
    cold = [math.exp(generator.gauss(8.0, 0.5)) for _ in range(300)]
    for times, is_cold in ((warm, False), (cold, True)):
        for ms in times:
            generator.choice(logs).record(trace(ms, cold=is_cold), None, NOW - generator.randrange(50))
    whole = history(*logs).whole
    for summary, times in ((whole.warm, warm), (whole.cold, cold)):
        ordered = sorted(times)
        assert summary.requests == len(ordered)
        assert summary.p50_ms == pytest.approx(ordered[math.ceil(0.5 * len(ordered)) - 1], rel=0.05)
        assert summary.p99_ms == pytest.approx(ordered[math.ceil(0.99 * len(ordered)) - 1], rel=0.05)


def test_percentiles_of_phases_are_those_of_the_requests_that_had_them() -> None:
    generator = random.Random(2)
    logs = [LatencyLog(NOW - 60) for _ in range(3)]
    load = [math.exp(generator.gauss(7.0, 1.0)) for _ in range(400)]
    fetch = [math.exp(generator.gauss(9.0, 0.5)) for _ in range(40)]
    mesh = [math.exp(generator.gauss(-2.0, 0.7)) for _ in range(900)]
    for n, ms in enumerate(load):
        start = trace(ms + fetch[n], cold=True, load=ms, fetch=fetch[n]) if n < len(fetch) else trace(ms, cold=True, load=ms)
        generator.choice(logs).record(start, None, NOW - generator.randrange(50))
    for ms in mesh:
        generator.choice(logs).record(trace(ms + 5.0, mesh=ms, prefill=5.0), None, NOW - generator.randrange(50))
    whole = history(*logs).whole
    assert (set(whole.cold_phases), set(whole.warm_phases)) == ({Phase.LOAD, Phase.FETCH}, {Phase.MESH, Phase.PREFILL})
    for summary, times in (
        (whole.cold_phases[Phase.LOAD], load),
        (whole.cold_phases[Phase.FETCH], fetch),
        (whole.warm_phases[Phase.MESH], mesh),
    ):
        ordered = sorted(times)
        assert summary.requests == len(ordered)
        assert summary.p50_ms == pytest.approx(ordered[math.ceil(0.5 * len(ordered)) - 1], rel=0.05)
        assert summary.p99_ms == pytest.approx(ordered[math.ceil(0.99 * len(ordered)) - 1], rel=0.05)


def test_a_phase_in_several_parts_counts_once() -> None:
    log = LatencyLog(NOW)
    mesh = CriticalSegment(phase=Phase.MESH, start_ms=0.0, duration_ms=1.0)
    parts = (mesh, CriticalSegment(phase=Phase.PREFILL, start_ms=1.0, duration_ms=6.0), mesh.model_copy(update={"start_ms": 7.0}))
    log.record(trace(8.0).model_copy(update={"critical_path": parts}), None, NOW)
    found = history(log).whole.warm_phases
    assert {phase: summary.requests for phase, summary in found.items()} == {Phase.MESH: 1, Phase.PREFILL: 1}
    assert found[Phase.MESH].p50_ms == pytest.approx(2.0, rel=0.05)


def test_gateway_of_an_earlier_version_has_means_alone() -> None:
    earlier = MinuteLatencies.model_validate({"minute": NOW, "cold": {80: 2}, "phases_ms": {"load": 2_000.0}})
    whole = summarize_history("m", [LatenciesViewed(gateway="g", since=NOW, minutes=(earlier,))], NOW, 5).whole
    assert (whole.phases_ms, whole.cold_phases) == ({Phase.LOAD: 1_000.0}, {})


def test_points_have_the_objectives_and_phases_of_their_interval() -> None:
    log = LatencyLog(NOW - 100)
    log.record(trace(4000.0, cold=True, fetch=1000.0, init=3000.0), False, NOW - 7)
    log.record(trace(2000.0, cold=True, init=2000.0), True, NOW - 7)
    log.record(trace(20.0, prefill=20.0), True, NOW)
    log.record(trace(None), False, NOW)
    log.record(trace(None), None, NOW)
    found = history(log, step=1)
    assert (len(found.points), found.step_s, found.since, found.gateways) == (60, 60, (NOW - 100) * 60, 1)
    assert [(p.at // 60 - NOW, p.judged, p.met, p.cold.requests, p.warm.requests) for p in found.points if p.judged] == [
        (-7, 2, 1, 2, 0),
        (0, 2, 1, 0, 1),
    ]
    point = next(p for p in found.points if p.cold.requests)
    assert point.phases_ms == {Phase.FETCH: 500.0, Phase.INIT: 2500.0}
    assert {phase: p.requests for phase, p in point.cold_phases.items()} == {Phase.FETCH: 1, Phase.INIT: 2}
    assert found.points[-1].phases_ms == {}, "means are those of cold starts"
    assert found.points[-1].warm_phases.keys() == {Phase.PREFILL}
    assert (found.whole.judged, found.whole.met) == (4, 2)
    assert history(log, model="other").whole.judged == 0


def test_minutes_beyond_an_hour_are_dropped() -> None:
    log = LatencyLog(NOW)
    log.record(trace(10.0), None, NOW)
    assert history(log, minute=NOW + 59, step=1).whole.warm.requests == 1
    assert history(log, minute=NOW + 61).whole.warm.requests == 0
    assert log.entries == 0


def test_memory_is_bounded_and_the_beginning_of_what_is_complete_moves() -> None:
    log = LatencyLog(NOW, max_entries=500)
    for n in range(2_000):
        log.record(trace(1.0 + n, model=f"m{n % 40}", cold=bool(n % 2), init=1.0), True, NOW + n // 100)
        assert log.entries <= 500
    since, _ = log.view("m0", NOW + 19)
    assert NOW < since <= NOW + 20
    assert history(log, minute=NOW + 19, step=1, model="m39").points[-1].judged > 0, "the latest minutes are kept"


def test_extreme_times_have_a_bin() -> None:
    assert [bin_of(ms) for ms in (0.0, 0.5, 1.0, 2.0, 1e12)] == [0, 0, 0, 8, MAX_BIN]
    assert [phase_bin_of(ms) for ms in (0.0, 0.0001, 1.0, 2.0, 1e12)] == [0, 0, 80, 88, MAX_PHASE_BIN]
