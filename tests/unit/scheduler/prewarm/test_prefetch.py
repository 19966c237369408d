"""Prefetched weights: likely models, and obstacles to prefetching."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.domain.effects import SendCancelPrefetch, SendPrefetch
from services.scheduler.domain.events import LoaderStatusReceived, RemoveModelRequested
from services.scheduler.domain.prewarm.prefetch import AGAIN_S, HORIZON_S, LIKELY, likelihood
from services.scheduler.domain.state.usage_history import UsageHistory
from shared.contracts.loader import CachedModel, LinkStatus, LoaderStatus, SegmentStatus
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World

ROOM = 1000 * MIB


def report_loader(
    w: World,
    node: str = "n1",
    *,
    cached: tuple[str, ...] = (),
    on_disk: tuple[str, ...] = (),
    used: int | None = None,
    queue_ms: float = 0.0,
    segments: tuple[SegmentStatus, ...] = (),
) -> None:
    held = tuple(CachedModel(weights_id=f"rev-/m/{name}", tier="dram", nbytes=100 * MIB) for name in cached)
    stored = tuple(CachedModel(weights_id=f"rev-/m/{name}", tier="ssd", nbytes=100 * MIB) for name in on_disk)
    status = LoaderStatus(
        node=node,
        boot_id="b",
        segments=segments,
        cached=(*held, *stored),
        dram_budget_bytes=ROOM,
        dram_bytes=len(held) * 100 * MIB if used is None else used,
        links=(LinkStatus(link="ssd:a", finish_ms=queue_ms),),
    )
    w.send(LoaderStatusReceived(w.now, status))


def used_to_be_asked_for(w: World, name: str, *, every: float = 30.0, times: int = 3) -> None:
    """Request the model `times` times, the last time just now, without serving it."""
    for _ in range(times):
        w.demand(name)
        w.demand(name, 0)
        w.sleep(name)
        for agent in w.agents.values():
            agent.instances.clear()
        w.tick(every)
    for agent in w.agents.values():
        agent.boot += "+"
    w.tick(4.0)


def world() -> World:
    w = World()
    w.node("n1", 400 * MIB)
    w.model("m")
    used_to_be_asked_for(w, "m")
    assert not w.state.by_model.get("m")
    return w


def prefetched(w: World) -> list[tuple[str, str, str]]:
    return [(e.node, e.command.card.name, e.command.tier) for e in w.sent(SendPrefetch)]


def test_likely_model_is_prefetched_to_an_idle_node_once() -> None:
    w = world()
    report_loader(w)
    w.tick(0.25)
    w.tick(0.25)
    assert prefetched(w) == [("n1", "m", "dram")]
    report_loader(w, cached=("m",))
    w.tick(0.25)
    assert not w.state.prefetches


def test_weights_on_a_nodes_disk_are_prefetched_to_its_memory_once() -> None:
    w = world()
    report_loader(w, on_disk=("m",))
    for _ in range(8):
        w.tick(0.25)
    assert prefetched(w) == [("n1", "m", "dram")]
    report_loader(w, on_disk=("m",), cached=("m",))
    w.tick(0.25)
    assert not w.state.prefetches


def test_prefetch_is_skipped_while_requests_wait_or_links_are_busy() -> None:
    w = world()
    w.model("full", pin=True)
    w.up("full")
    w.model("other")
    w.demand("other")
    report_loader(w)
    w.tick(0.25)
    assert prefetched(w) == []
    w.demand("other", 0)
    report_loader(w, queue_ms=900.0)
    w.tick(0.25)
    assert prefetched(w) == []


def test_prefetch_does_not_evict_a_likelier_model() -> None:
    w = world()
    w.model("often")
    used_to_be_asked_for(w, "often", every=5.0, times=6)
    report_loader(w, cached=("often",), used=ROOM)
    w.tick(0.25)
    assert prefetched(w) == []
    w.model("never")
    report_loader(w, cached=("never",), used=ROOM)
    w.tick(0.25)
    assert ("n1", "m", "dram") in prefetched(w)


def test_dropped_prefetch_is_retried_and_a_running_one_is_not_repeated() -> None:
    w = world()
    report_loader(w)
    w.tick(0.25)
    assert len(prefetched(w)) == 1
    w.tick(1.0)
    under_way = (
        SegmentStatus(weights_id="rev-/m/m", model="m", segment="s", total_bytes=9, loaded_bytes=1, holders=("prefetch:1",)),
    )
    report_loader(w, segments=under_way)
    w.tick(AGAIN_S)
    report_loader(w, segments=under_way)
    w.tick(1.0)
    assert len(prefetched(w)) == 1
    report_loader(w)
    w.tick(0.25)
    assert prefetched(w) == [("n1", "m", "dram")] * 2


def test_prefetch_of_a_removed_model_is_cancelled() -> None:
    w = world()
    report_loader(w)
    w.tick(0.25)
    w.admin(RemoveModelRequested(w.now, "removal", "m"))
    w.tick(0.25)
    token = w.sent(SendPrefetch)[-1].command.token
    assert [(e.node, e.command.weights_id, e.command.token) for e in w.sent(SendCancelPrefetch)] == [("n1", "rev-/m/m", token)]


def test_a_period_is_noticed() -> None:
    habit = UsageHistory("m", 0.0)
    for n in range(1, 6):
        habit = habit.used_at(n * 3600.0)
    last = 5 * 3600.0
    assert likelihood(habit, last + 1800.0) < LIKELY
    assert likelihood(habit, last + 3600.0 - HORIZON_S / 2) > LIKELY
    assert likelihood(habit, last + 3 * 3600.0) < LIKELY


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=20), st.floats(0.0, 1e6))
def test_likelihood_is_between_zero_and_one(distances: list[float], unused: float) -> None:
    habit, at = UsageHistory("m", 0.0), 0.0
    for distance in distances:
        at += distance
        habit = habit.used_at(at)
    assert 0.0 <= likelihood(habit, at + unused) <= 1.0
    assert likelihood(UsageHistory("m", 0.0), unused) == likelihood(None, unused) == 0.0
