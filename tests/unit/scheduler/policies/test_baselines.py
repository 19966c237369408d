"""The baselines, SwapServeLLM's victims, and their shared parts."""

from __future__ import annotations

import pytest

from services.scheduler.domain.policies.common import (
    evict_lru,
    keep_load_time,
    keep_setting,
    keep_until_needed,
    one_each,
    per_request,
)
from services.scheduler.domain.policies.port import Clearance, Demand, Resident
from simulator.policies import baselines, swapservellm
from tests.unit.scheduler.policies.views import ask, device, option


def resident(key: str, state: str = "idle", **more: object) -> Resident:
    return Resident(key, model=key, nbytes=10, state=state, **more)  # type: ignore[arg-type]  # the test's own keywords


def test_random_scheduler_draws_devices_uniformly_and_the_fastest_way_on_each() -> None:
    options = [option("n0/g0", 5.0), option("n0/g0", 1.0, "reuse"), option("n1/g0", 9.0), option("n2/g0", 9.0)]
    drawn = [baselines.any_device(ask(), options, f"plan {n}") for n in range(300)]
    counts = {o.key: drawn.count(o) for o in options if o in drawn}
    assert sum(counts.values()) == 300
    assert all(70 < c < 130 for c in counts.values())
    assert options[0] not in drawn
    assert baselines.any_device(ask(), [], "") is None


def test_least_recently_used_prefers_free_room_then_the_oldest_victim() -> None:
    old, new = resident("old", last_used=1.0), resident("new", last_used=5.0)
    evict_old = option("n0/g0", clearance=Clearance("evict", ("old",), 10), residents=(old,))
    evict_new = option("n1/g0", clearance=Clearance("evict", ("new",), 10), residents=(new,))
    room = option("n2/g0", seconds=99.0, free=10)
    assert baselines.least_recently_used(ask(), [evict_new, evict_old, room], "") == room
    assert baselines.least_recently_used(ask(), [evict_new, evict_old], "") == evict_old


def test_victims_by_last_use_and_by_loading() -> None:
    view = device("n/g", resident("a", last_used=1.0, ready_at=9.0), resident("b", last_used=2.0, ready_at=1.0))
    assert evict_lru(ask(), view, 10, 0.0) == Clearance("evict", ("a",), 10)
    assert baselines.evict_first_in(ask(), view, 10, 0.0) == Clearance("evict", ("b",), 10)


def test_early_binding_evicts_nothing_and_keeps_one_instance() -> None:
    assert baselines.NATIVE.clear(ask(), device("n/g", resident("a")), 10, 0.0) is None
    options = [option("n0/g0", free=5), option("n1/g0", free=9)]
    assert baselines.bind_early(ask(), options, "") == options[1]
    assert baselines.bind_early(ask(is_extra=True), options, "") is None
    ready = option("n2/g0", way="ready")
    assert baselines.bind_early(ask(is_extra=True), [*options, ready], "") == ready


def test_demand_aware_preemption_takes_the_shortest_queue_then_the_oldest() -> None:
    view = device(
        "n/g",
        resident("busy", "serving", queued=3, active=1, remaining_s=9.0),
        resident("quiet", "serving", queued=0, active=1, remaining_s=4.0),
        resident("new", last_used=5.0),
        resident("old", last_used=1.0),
        resident("pinned", protected_reason="pinned"),
    )
    assert swapservellm.clear(ask(), view, 20, 0.0) is not None
    found = swapservellm.clear(ask("asking"), view, 30, 0.0)
    assert found == Clearance("suspend", ("old", "new", "quiet"), 30, 4.0)
    assert swapservellm.clear(ask("asking"), view, 41, 0.0) is None


def test_keep_alive_formulas_of_the_baselines() -> None:
    assert (keep_load_time(60.0, 1.5), keep_setting(60.0, 1.5), keep_until_needed(60.0, 1.5)) == (1.5, 60.0, -1)
    assert baselines.infless_keep([], [], 8.0) == 8.0
    assert baselines.infless_keep([], [5.0, 20.0], 8.0) == 20.0
    assert baselines.infless_keep([10.0], [20.0], 8.0) == 15.0
    assert baselines.infless_keep([], [float(n) for n in range(1, 101)], 8.0) == 99.0


@pytest.mark.parametrize(
    ("waiting", "running", "live", "one", "each"),
    [(0, 0, 0, 0, 0), (1, 0, 0, 1, 1), (5, 3, 1, 1, 4), (0, 0, 2, 2, 0), (90, 0, 1, 1, 9)],
)
def test_replica_targets_of_the_baselines(waiting: int, running: int, live: int, one: int, each: int) -> None:
    demand = Demand("m", waiting, running, live, capacity=2, max_replicas=9)
    assert (one_each(demand), per_request(demand)) == (one, each)
