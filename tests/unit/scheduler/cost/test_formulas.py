"""The papers' formulas against values computed by hand and the papers' examples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.domain.cost.formulas import (
    AFTER,
    BEFORE,
    BRINGING,
    ENGINE,
    critical_path,
    critical_phases,
    load_s,
    request_rate,
    resume_s,
    reuse_odds,
    total_delay_s,
    two_way_load_s,
)
from services.scheduler.domain.cost.links import busy_until, find_slowest
from shared.contracts.loader import LinkStatus, LoaderStatus
from shared.contracts.phases import Phase, measure_covered

PHASES = (*BEFORE, *BRINGING, *ENGINE, *AFTER)
phases = st.dictionaries(st.sampled_from(PHASES), st.floats(0, 1e4))


def test_q_and_n_over_b() -> None:
    assert load_s(12_000_000_000, 6e9, queue_s=1.5) == pytest.approx(3.5)


def test_resume_time_follows_from_the_token_count() -> None:
    assert resume_s(100, 60, 0.001, 0.2) == pytest.approx(0.36)


def test_phases_are_the_maps() -> None:
    assert set(PHASES) <= set(Phase)
    assert len(set(PHASES)) == len(PHASES)


@given(phases)
def test_overlapping_phases_count_once(some: dict[str, float]) -> None:
    total = critical_path(some)
    assert total <= sum(some.values()) + 1e-6
    assert total >= max(some.values(), default=0.0) - 1e-6
    assert total == pytest.approx(sum(some.get(p, 0.0) for p in critical_phases(some)))


@given(phases, st.sampled_from(PHASES), st.floats(0, 100))
def test_additional_phase_never_shortens_the_critical_path(some: dict[str, float], phase: str, more: float) -> None:
    assert critical_path({**some, phase: some.get(phase, 0.0) + more}) >= critical_path(some) - 1e-6


def test_overlapping_spans_count_once() -> None:
    assert measure_covered([]) == 0
    assert measure_covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 1e3))
def test_the_longer_unused_the_less_likely(a: float, b: float, horizon: float) -> None:
    low, high = sorted((a, b))
    assert 0 < reuse_odds(high, horizon) <= reuse_odds(low, horizon) <= 1


def loader(*links: LinkStatus, speed: float | None = None) -> LoaderStatus:
    return LoaderStatus(node="n", boot_id="b", bytes_per_second=speed, links=links)


def test_slowest_link_of_the_route_determines_the_speed() -> None:
    links = (LinkStatus(link="ssd:nvme0n1", bytes_per_second=6e9), LinkStatus(link="bus:cuda:0", bytes_per_second=2e9))
    assert find_slowest("ssd", "cuda:0", loader(*links)) == 2e9
    assert find_slowest("ssd", "cuda:1", loader(*links)) == 6e9
    assert find_slowest("dram", "cuda:0", loader(*links)) == 2e9
    assert find_slowest("dram", "cuda:1", loader(*links, speed=1e9)) is None
    assert find_slowest("remote", "cuda:1", loader(*links, speed=1e9)) == 1e9
    assert find_slowest("ssd", "cuda:0", None) is None


def test_link_queue_includes_reported_and_newly_decided_loads() -> None:
    busy = loader(LinkStatus(link="ssd:a", finish_ms=2000.0), LinkStatus(link="remote:b"), speed=1e9)
    assert busy_until(100.0, busy, ()) == 102.0
    assert busy_until(100.0, busy, [(101.0, 10**9), (99.0, 10**9)]) == 103.0
    assert busy_until(100.0, loader(speed=2e9), [(110.0, 10**9)]) == 110.5
    assert busy_until(100.0, loader(), ()) == 0.0
    assert busy_until(100.0, loader(LinkStatus(link="p2p:cpu:1>cpu:2", finish_ms=2000.0)), ()) == 0.0, "no source waits for it"
    assert busy_until(0.0, None, [(5.0, 10**9)]) == 6.0


def test_requests_that_arrive_until_a_model_is_back_wait_for_half_of_the_delay() -> None:
    assert total_delay_s(10.0, 0.0) == 10.0
    assert total_delay_s(10.0, 2.0) == pytest.approx(10 + 20 * 5)


def test_rate_of_a_model_falls_while_no_request_arrives() -> None:
    assert request_rate(0, 100.0, 100.0) == 0.0
    assert request_rate(50, 100.0, 1.0) == pytest.approx(0.5)
    assert request_rate(50, 100.0, 40.0) == pytest.approx(1 / 20)
    assert request_rate(5, 0.0, 0.0) < float("inf")


@pytest.mark.parametrize(
    ("peer_bytes", "peer_rate", "queue_s", "seconds", "from_peer"),
    [
        (600, 200.0, 0.0, 4.0, 600),  # the peer is done first
        (1000, 300.0, 0.0, 2.5, 750),  # both links end together
        (1000, 300.0, 1.0, 2.75, 825),
        (1000, 300.0, 9.0, 1000 / 300, 1000),  # the source is queued for longer than the peer needs
        (0, 300.0, 1.0, 11.0, 0),
    ],
)
def test_two_links_share_a_load(peer_bytes: int, peer_rate: float, queue_s: float, seconds: float, from_peer: float) -> None:
    found = two_way_load_s(1000, 100.0, peer_bytes, peer_rate, queue_s)
    assert found == pytest.approx((seconds, from_peer))
