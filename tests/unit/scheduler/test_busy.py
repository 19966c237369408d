"""When the scheduler ticks rarely: only while time alone changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.scheduler.domain.busy import is_busy, is_node_lost_soon
from services.scheduler.domain.decide import decide
from services.scheduler.domain.events import Recovered, Tick
from services.scheduler.domain.policies.torpor_queue import PERIOD_S
from services.scheduler.domain.prewarm.prefetch import AT_A_TIME
from services.scheduler.domain.state.changes import Put, apply
from services.scheduler.domain.state.measurements import SloCounts
from services.scheduler.domain.state.migrations import Migration
from services.scheduler.domain.state.usage_history import Prefetch, UsageHistory
from services.scheduler.domain.state.volatile import ParkFailures
from services.scheduler.domain.values import replace
from shared.contracts.node import InstanceState
from shared.errors import EngineFailed
from tests.unit.scheduler.world import World

WITHIN_S = 1.0


def busy(w: World) -> bool:
    """Return `is_busy`; of an idle state, prove that the next second changes nothing."""
    if is_busy(w.state, w.now, w.policy, WITHIN_S):
        return True
    for later in (w.now, w.now + 0.25, w.now + 0.5, w.now + 0.75):
        decision = decide(w.state, Tick(later), later, w.policy)
        assert (decision.changes, decision.effects) == ((), ())
    return False


@pytest.fixture
def idle(w: World) -> World:
    """A world with one node and one idle, ready instance that has long to live."""
    w.node()
    w.model("m", keep_alive=300)
    w.up("m")
    w.tick(5.0)
    assert not busy(w)
    return w


def waiting_request(w: World) -> None:
    w.demand("m", 1)


def running_request(w: World) -> None:
    w.demand("m", 0, in_flight=1)


def starting(w: World) -> None:
    w.model("other", replicas={"min": 1, "max": 1})


def woken(w: World) -> None:
    w.model("other")
    w.wake("other")


def put_to_sleep(w: World) -> None:
    w.sleep("m")


def drained(w: World) -> None:
    w.model("other", keep_alive=300)
    w.up("other")
    w.of("other")[0].active = 1
    w.report()
    w.change_node("n1", "drain")


def without_room(w: World) -> None:
    w.change_node("n1", "cordon")
    w.model("other", replicas={"min": 1, "max": 1})


def failing(w: World) -> None:
    w.model("kept", replicas={"min": 1, "max": 1})
    w.get_ready("kept")
    w.tick(5.0)
    w.fail("kept", EngineFailed("it crashed").body())


def migrating(w: World) -> None:
    instance = next(iter(w.state.instances))
    apply(w.state, [Put(Migration("m-1", "m", instance, w.now, "operator"))])


def prefetching(w: World) -> None:
    apply(w.state, [Put(Prefetch("m", "n1", "weights", "dram", w.now, 1))])


def to_be_parked(w: World) -> None:
    w.model("parked", park=True)


@pytest.mark.parametrize(
    "reason",
    [
        waiting_request,
        running_request,
        starting,
        woken,
        put_to_sleep,
        drained,
        without_room,
        failing,
        migrating,
        prefetching,
        to_be_parked,
    ],
)
def test_waiting_or_pending_work_makes_the_scheduler_busy(idle: World, reason: Callable[[World], None]) -> None:
    reason(idle)
    assert busy(idle)


def test_scheduler_is_idle_after_the_last_request(idle: World) -> None:
    idle.demand("m", 0, in_flight=1)
    assert busy(idle)
    idle.demand("m", 0)
    assert not busy(idle)


def test_scheduler_is_busy_shortly_before_a_keep_alive_ends(idle: World) -> None:
    due = next(iter(idle.state.deadlines.values()))
    idle.now = due - 3.0
    idle.tick()
    for before, expected in ((1.5, False), (0.9, True), (0.1, True)):
        idle.now = due - before
        idle.report()
        assert busy(idle) == expected
    idle.tick(0.2)
    assert idle.stops("m")


def test_instance_of_replicas_min_is_idle_after_its_keep_alive(w: World) -> None:
    w.node()
    w.model("m", keep_alive=10, replicas={"min": 1, "max": 1})
    w.get_ready("m")
    assert not busy(w)
    for _ in range(20):
        w.tick(1.0)
    assert w.of("m", InstanceState.READY)
    assert not busy(w)


def test_a_new_term_is_busy_until_demand_is_repeated(idle: World) -> None:
    idle.state.recovered_at = idle.now
    idle.send(Recovered(idle.now))
    assert busy(idle)
    idle.now += idle.policy.demand_grace_s
    assert not busy(idle)


def test_failed_parking_does_not_keep_the_scheduler_busy(idle: World) -> None:
    idle.model("parked", park=True)
    apply(idle.state, [Put(ParkFailures("parked", 3, idle.now, idle.now + 30, "it crashed"))])
    assert busy(idle)
    apply(idle.state, [Put(ParkFailures("parked", 3, idle.now, idle.now, "it crashed", "failed"))])
    assert not busy(idle)


def test_more_usage_histories_than_a_tick_examines_are_busy(idle: World) -> None:
    apply(idle.state, [Put(UsageHistory(f"m{n}", idle.now)) for n in range(AT_A_TIME)])
    assert busy(idle)
    idle.policy = replace(idle.policy, prefetch=False)
    assert not busy(idle)


def test_slo_queue_is_busy_shortly_before_its_period_ends(idle: World) -> None:
    apply(idle.state, [Put(SloCounts("m"))])
    idle.tick()
    since = idle.state.slo_queue[""].since
    for age, expected in ((PERIOD_S - 1.5, False), (PERIOD_S - 0.5, True)):
        idle.now = since + age
        idle.report()
        assert busy(idle) == expected
    idle.policy = replace(idle.policy, profile=replace(idle.policy.profile, slo_queue=False))
    assert not busy(idle)


def test_silent_node_makes_the_scheduler_busy_before_it_is_lost(idle: World) -> None:
    reported_at = idle.now
    for silence, expected in ((3.9, False), (4.1, True), (4.9, True)):
        idle.now = reported_at + silence
        assert is_node_lost_soon(idle.state, idle.now, idle.policy, WITHIN_S) == expected
    idle.report()
    assert not is_node_lost_soon(idle.state, idle.now, idle.policy, WITHIN_S)
    idle.now += 100
    idle.tick(nodes_report=False)
    assert not is_node_lost_soon(idle.state, idle.now, idle.policy, WITHIN_S)
