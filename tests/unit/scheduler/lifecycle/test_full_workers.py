"""Full workers of pipeline groups: memory promised to the instance that replaces the group."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.domain.effects import OrderMigration
from services.scheduler.domain.events import MigrationUpdated
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.values import replace
from shared.contracts.models import Slo
from shared.contracts.node import InstanceState
from shared.errors import EngineFailed
from tests.support.divided_models import (
    begin_successor,
    chosen,
    divided,
    fail,
    fill,
    make,
    others,
    promised,
    serving,
    with_token_time,
)
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World
from thaw.cli.explain import _way

READY, LOADING = InstanceState.READY, InstanceState.LOADING
WHOLE = 382 * MIB
"""Memory of an instance of the model; a stage of two needs 291 MiB."""


def test_objective_that_low_memory_workers_miss_is_met_with_a_full_worker() -> None:
    w = divided()
    assert (chosen(w).ready_by, chosen(w).stages, chosen(w).full_workers) == ("pipeline", 2, 1)
    assert promised(w) == {"n0/cpu:0": WHOLE}, "55 ms x (2 - 1 + 1/2) and two hops are within 100 ms"
    b = booking_of(w.state, "n0", "cpu:0")
    assert b.claimed_bytes == WHOLE
    assert b.free_bytes == b.budget_bytes - b.held_bytes - WHOLE
    assert not w.state.claimed, "no start waits for this memory"
    plan = w.state.last_plan_of("m")
    assert plan is not None
    assert plan.reason.endswith("1 of them is a full worker, so that a further token takes at most 84 ms")
    assert _way(chosen(w)) == "pipeline of 2, 1 full"


def test_as_many_full_workers_as_the_objective_needs_and_no_more() -> None:
    assert chosen(divided(45.0)).full_workers == 0
    assert chosen(divided(70.0)).full_workers == 2
    w = divided(99.5, nodes=4)
    assert chosen(w).stages == 1, "one worker is the only one that is fast enough, and it misses the first token's"
    assert "101 ms for each further token" not in str(others(w)[2].excluded)
    assert "102 ms for each further token, which misses" in str(others(w)[2].excluded)


def test_without_an_objective_for_each_token_no_memory_is_promised() -> None:
    w = make(6.0)
    w.demand("m")
    assert (chosen(w).stages, chosen(w).full_workers) == (2, 0)
    assert not promised(w)
    assert _way(chosen(w)) == "pipeline of 2"


def test_device_that_another_instance_uses_or_without_room_is_no_full_worker() -> None:
    w = make(6.0, nodes=2, slo=Slo(ttft=6.0, tpot=0.1))
    for n in ("n0", "n1"):
        w.model(f"on-{n}", weights=10 * MIB, placement={"devices": [f"{n}/*"]})
        w.up(f"on-{n}")
    with_token_time(w, 55.0)
    w.demand("m")
    assert chosen(w).stages == 1
    assert "may take 112 ms for each further token, with 0 full workers, as many as have room" in str(others(w)[2].excluded)


def test_groups_that_are_not_consolidated_have_no_full_workers() -> None:
    w = with_token_time(make(6.0, slo=Slo(ttft=6.0, tpot=0.1)), 55.0)
    w.policy = Policy(consolidate=False)
    w.demand("m")
    assert chosen(w).stages == 1


def test_consolidation_takes_the_promised_memory_where_no_other_is_free() -> None:
    w = divided()
    group = serving(w)
    fill(w)
    assert all(booking_of(w.state, n, "cpu:0").free_bytes < WHOLE for n in w.agents)
    w.tick(3.0)
    [one] = [r for r in w.of("m", LOADING) if r.group is None]
    assert one.command.instance_id in w.agents["n0"].instances
    assert not promised(w), "it is the instance's memory now"
    w.get_ready("m")
    w.tick()
    record = w.sent(OrderMigration)[-1].record
    group[0].active, one.active = 0, 1
    w.send(MigrationUpdated(w.now, record.model_copy(update={"state": "done"})))
    for _ in range(3):
        w.finish_stops()
        w.tick(0.5)
    assert w.of("m") == [one]


def test_without_a_promise_the_same_group_stays() -> None:
    w = divided(45.0)
    serving(w)
    fill(w)
    for _ in range(10):
        w.tick(0.5)
    assert not [r for r in w.of("m") if r.group is None]


def test_promise_yields_to_a_model_that_would_wait_and_to_no_other() -> None:
    w = divided()
    serving(w)
    w.model("small", weights=100 * MIB)
    w.up("small")
    assert promised(w), "it has room elsewhere"
    w.model("large", weights=350 * MIB, placement={"devices": ["n0/*"]})
    w.demand("large")
    assert w.of("large", LOADING), "it does not wait for memory that is only promised"
    assert not promised(w)
    group = [r for r in w.of("m", READY) if r.group is not None]
    assert len(group) == 2, "the group serves on"


def test_promise_does_not_yield_where_that_gives_no_room() -> None:
    w = divided()
    serving(w)
    w.model("vast", weights=620 * MIB, placement={"devices": ["n0/*"]})
    w.demand("vast")
    assert not w.of("vast")
    assert promised(w)


def removed(w: World) -> None:
    w.remove("m")


def fails(w: World, index: int) -> None:
    stage = next(r for r in w.of("m") if r.group is not None and r.group.index == index)
    stage.state, stage.error = InstanceState.FAILED, EngineFailed("it ended").body()
    w.report()


def first_fails(w: World) -> None:
    fails(w, 0)


def later_fails(w: World) -> None:
    fails(w, 1)
    fails(w, 0)  # of a ready group it notices; of a starting one it is stopped


def cordoned(w: World) -> None:
    w.change_node("n0", "cordon")


def drained(w: World) -> None:
    w.change_node("n1", "drain")
    w.tick(60.5)


def asleep(w: World) -> None:
    for r in w.of("m"):
        r.active, r.idle_since = 0, w.now
    w.report()
    w.sleep("m")


def silent(w: World) -> None:
    w.now += 30
    w.report("n1")
    w.tick(nodes_report=False)


def unwanted(w: World) -> None:
    for r in w.of("m"):
        r.active, r.idle_since = 0, w.now - 1000
    w.demand("m", 0)
    w.tick(5.5)


def turned_off(w: World) -> None:
    w.policy = replace(w.policy, consolidate=False)
    w.tick()


@pytest.mark.parametrize("is_ready", [False, True])
@pytest.mark.parametrize("end", [removed, first_fails, later_fails, cordoned, drained, asleep, silent, unwanted, turned_off])
def test_promise_ends_when_its_group_does(end: Any, is_ready: bool) -> None:
    w = divided(keep_alive=5)
    if is_ready:
        serving(w)
    [group] = [f.group for f in w.state.full_workers.values()]
    end(w)
    assert all(f.group != group for f in w.state.full_workers.values())
    assert promised(w).keys() <= {"n0/cpu:0"}, "of another group, which replaces it"


def test_new_leader_makes_the_promises_again_from_the_plan() -> None:
    w = divided()
    serving(w)
    before = promised(w)
    w.change_leader()
    assert promised(w) == before, "before any node has reported"
    w.report()
    w.tick()
    assert promised(w) == before
    assert {s.node for s in w.state.later_stages.values()} == {"n1"}


def test_failed_start_of_the_successor_returns_the_promise_for_the_next_one() -> None:
    w = divided()
    serving(w)
    fill(w)
    one = begin_successor(w)
    fail(w, one)
    assert promised(w) == {"n0/cpu:0": WHOLE}
    held = sum(booking_of(w.state, n, "cpu:0").held_bytes for n in w.agents)
    assert held == sum(r.command.reserve_bytes for r in (*w.of("m"), *(r for n in w.agents for r in w.of(f"on-{n}"))))
    for _ in range(200):
        w.tick(0.5)
        if successors := [r for r in w.of("m", LOADING) if r.group is None]:
            break
    assert successors, "no other device has room"
    assert successors[0].command.instance_id in w.agents["n0"].instances
    assert not promised(w)


def test_ready_successor_that_fails_returns_the_promise() -> None:
    w = divided()
    serving(w)
    fill(w)
    one = begin_successor(w)
    w.get_ready("m")
    fail(w, one)
    assert promised(w) == {"n0/cpu:0": WHOLE}


def test_promise_does_not_return_where_a_waiting_model_takes_the_memory() -> None:
    w = divided()
    serving(w)
    fill(w)
    one = begin_successor(w)
    w.model("other", weights=140 * MIB, placement={"devices": ["n0/*"]})
    w.demand("other")
    assert not w.of("other"), "it waits"
    fail(w, one)
    w.tick(0.5)
    assert w.of("other", LOADING)
    assert not promised(w)


def test_promise_does_not_return_to_a_group_that_leaves() -> None:
    w = divided()
    serving(w)
    fill(w)
    one = begin_successor(w)
    w.remove("m")
    fail(w, one)
    assert not promised(w)
