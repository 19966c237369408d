"""A pipeline group that the scheduler chose becomes one instance while it serves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from services.scheduler.domain.effects import OrderMigration, PublishLoadFailed, SendPrepare
from services.scheduler.domain.events import MigrationUpdated
from services.scheduler.domain.migration.consolidation import is_consolidation_due
from services.scheduler.domain.policies.autoscaling import needed_workers
from services.scheduler.domain.policies.port import Demand
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.state.entities import CONSOLIDATION
from shared.contracts.admin import ModelAsleep
from shared.contracts.base import ErrorBody
from shared.contracts.migration import MigrationRecord
from shared.contracts.node import InstanceState
from shared.errors import EngineFailed
from tests.support.divided_models import make
from tests.support.fake_node import MIB
from tests.unit.scheduler.fake_agents import Running
from tests.unit.scheduler.world import World

READY, LOADING, DRAINING = InstanceState.READY, InstanceState.LOADING, InstanceState.DRAINING


def group_of(w: World) -> list[Running]:
    """Return the stages of the model's group, in order."""
    return sorted((r for r in w.of("m") if r.group is not None), key=lambda r: r.group.index if r.group else 0)


def whole(w: World, *states: InstanceState) -> list[Running]:
    return [r for r in w.of("m", *states) if r.group is None]


def serving(w: World, active: int = 1) -> list[Running]:
    """Start the group for a request, which it then serves."""
    w.demand("m", 1)
    w.get_ready("m")
    w.demand("m", 0, in_flight=active)
    group = group_of(w)
    assert len(group) == 2
    group[0].active = active
    w.report()
    return group


def node_of(r: Running, w: World) -> str:
    return next(name for name, agent in w.agents.items() if r.command.instance_id in agent.instances)


def orders(w: World) -> list[MigrationRecord]:
    return [e.record for e in w.sent(OrderMigration)]


def end(w: World, record: MigrationRecord, state: str = "done", **fields: Any) -> None:
    w.send(MigrationUpdated(w.now, record.model_copy(update={"state": state, **fields})))


def stopped(w: World) -> set[str]:
    return {s.command.instance_id for s in w.stops("m")}


def later(w: World, seconds: float = 3.0) -> None:
    """Let time pass with a request running, as gateways repeat it."""
    for _ in range(int(seconds / 0.5)):
        w.now += 0.5
        if any(r.active for r in w.of("m")):
            w.demand("m", 0, in_flight=1)
        w.tick()


def test_group_becomes_one_instance_on_a_device_of_a_stage_and_stops_as_a_whole() -> None:
    w = make(6.0)
    group = serving(w)
    later(w)
    [one] = whole(w, LOADING)
    assert node_of(one, w) in {node_of(r, w) for r in group}, "its node has a part of the weights"
    plan = w.state.last_plan_of("m")
    assert plan is not None
    assert (plan.trigger, plan.chosen.stages if plan.chosen else 0) == (CONSOLIDATION, 1)
    assert plan.reason.startswith(f"the group {group[0].command.instance_id} becomes one instance")
    prepares = [e.command for e in w.sent(SendPrepare) if e.command.instance_id == one.command.instance_id]
    assert [(p.background, p.layers) for p in prepares] == [(True, None)], "it loads all, after loads that requests wait for"
    later(w, 20.0)
    assert not orders(w)
    assert not w.stops("m"), "the group serves until the other one is ready, however long that takes"
    w.get_ready("m")
    w.tick()
    [record] = orders(w)
    assert (record.source_instance, record.instance_id) == (group[0].command.instance_id, one.command.instance_id)
    assert record.reason == CONSOLIDATION
    assert not w.stops("m"), "the migration may fail, and requests would continue in the group"
    group[0].active, one.active = 0, 1
    end(w, record)
    for _ in range(3):
        w.finish_stops()
        w.tick(0.5)
    assert w.of("m") == [one]
    assert not w.state.later_stages
    held = {n: booking_of(w.state, n, "cpu:0").held_bytes for n in w.agents}
    assert sum(held.values()) == one.command.reserve_bytes, "the group's memory is given back on all devices"


def test_idle_group_is_replaced_without_a_migrator() -> None:
    w = make(6.0)
    group = serving(w)
    group[0].active, group[0].idle_since, group[0].completed = 0, w.now, 1
    w.demand("m", 0)
    w.tick(3.0)
    [one] = whole(w, LOADING)
    w.get_ready("m")
    w.tick()
    assert not orders(w)
    assert stopped(w) == {group[0].command.instance_id}
    for _ in range(3):
        w.finish_stops()
        w.tick(0.5)
    assert w.of("m") == [one]


def test_model_whose_group_is_being_consolidated_can_be_put_to_sleep() -> None:
    w = make(6.0)
    group = serving(w)
    later(w)
    assert whole(w, LOADING)
    waiter = w.sleep("m")
    assert not w.state.migrations
    group[0].active = 0
    for _ in range(3):
        w.finish_stops()
        w.tick(0.5)
    assert not w.of("m")
    assert isinstance(w.answer(waiter), ModelAsleep)


def wished(w: World) -> None:
    w.state.models["m"].card.spec.__dict__["stages"] = 2


def waiting(w: World) -> None:
    w.demand("m", 1, in_flight=1)


def surge(w: World) -> None:
    w.demand("m", 0, in_flight=1, window=3, peak=3)


def other_waits(w: World) -> None:
    for name in ("pinned", "big"):
        w.model(name, weights=400 * MIB, pin=name == "pinned", placement={"devices": ["n3/*"]})
        w.demand(name, 1)
        w.get_ready(name)


def no_room(w: World) -> None:
    for n in w.agents:
        w.model(f"on-{n}", weights=400 * MIB, placement={"devices": [f"{n}/*"]})
        w.up(f"on-{n}")


@pytest.mark.parametrize("obstacle", [wished, waiting, surge, other_waits, no_room])
def test_group_stays_while(obstacle: Any) -> None:
    w = make(6.0)
    serving(w)
    obstacle(w)
    before = len(w.starts("m"))
    for _ in range(8):
        w.tick(0.5)
        if obstacle in (waiting, surge):
            obstacle(w)
    assert len(w.starts("m")) == before
    assert not w.state.migrations
    assert not w.stops("m")


def test_consolidation_can_be_turned_off() -> None:
    w = make(6.0)
    w.policy = Policy(consolidate=False)
    serving(w)
    later(w, 10.0)
    assert not whole(w)


def test_idle_group_that_ends_sooner_is_left_alone() -> None:
    w = make(6.0, keep_alive=4)
    group = serving(w)
    group[0].active, group[0].idle_since, group[0].completed = 0, w.now, 1
    w.demand("m", 0)
    for _ in range(10):
        w.tick(0.5)
        w.finish_stops()
    assert not whole(w)
    assert not w.of("m")


def test_nothing_is_evicted_for_it() -> None:
    w = make(6.0, nodes=2)
    for n in ("n0", "n1"):
        w.model(f"on-{n}", weights=350 * MIB, placement={"devices": [f"{n}/*"]})
        w.up(f"on-{n}")
    serving(w)
    later(w, 10.0)
    assert not whole(w)
    assert {r.command.card.name for a in w.agents.values() for r in a.instances.values()} == {"m", "on-n0", "on-n1"}


def test_failed_start_leaves_the_group_and_is_retried_elsewhere_with_back_off() -> None:
    w = make(6.0)
    group = serving(w)
    later(w)
    nodes: list[str] = []
    times: list[float] = []
    for _ in range(200):
        for one in whole(w, LOADING):
            nodes.append(node_of(one, w))
            times.append(w.now)
            one.state, one.error = InstanceState.FAILED, EngineFailed("it failed").body()
            w.report()
        later(w, 0.5)
        if len(times) == 4:
            break
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert len(gaps) == 3
    assert gaps == sorted(gaps)
    assert gaps[-1] > gaps[0], "each failure doubles the pause"
    assert len(set(nodes)) > 1, "another device is tried"
    assert not w.sent(PublishLoadFailed), "no request fails"
    assert not w.stops("m")
    assert all(r.state is READY for r in group)


def test_group_dies_while_the_whole_instance_starts() -> None:
    w = make(6.0)
    group = serving(w)
    later(w)
    [one] = whole(w, LOADING)
    for r in group:
        r.state, r.error, r.active = InstanceState.FAILED, EngineFailed("a stage is gone").body(), 0
    w.demand("m", 1)
    w.report()
    w.tick(0.5)
    assert whole(w, LOADING) == [one], "its requests wait for the instance that starts"
    assert not w.state.migrations
    w.get_ready("m")
    assert w.demand("m", 1).outlook == "ready"


def test_failed_migration_leaves_both_and_is_repeated() -> None:
    w = make(6.0)
    serving(w)
    later(w)
    w.get_ready("m")
    w.tick()
    end(w, orders(w)[0], "failed", error=ErrorBody(code="unreachable", message="gone"))
    assert not w.stops("m")
    later(w, 20.0)
    assert len(orders(w)) == 2
    assert len(whole(w, READY)) == 1, "the instance that is there is the destination"


def test_new_leader_continues() -> None:
    w = make(6.0)
    serving(w)
    later(w)
    w.change_leader()
    for _ in range(3):
        w.report()
    later(w, 10.0)
    assert len(whole(w, LOADING)) == 1, "the start of the last leader is the destination"
    w.get_ready("m")
    w.tick()
    assert len(orders(w)) == 1


@pytest.mark.parametrize(
    ("demand", "workers"),
    [
        ({"waiting": 0, "running": 0}, 0),
        ({"waiting": 0, "running": 4}, 1),
        ({"waiting": 0, "running": 2, "peak_requests": 4}, 1),
        ({"waiting": 0, "running": 2, "peak_requests": 5}, 2),
        ({"waiting": 3, "running": 4}, 2),
        ({"waiting": 9, "running": 4}, 4),
    ],
)
def test_needed_workers(demand: dict[str, int], workers: int) -> None:
    assert needed_workers(Demand("m", live=1, capacity=4, **demand)) == workers


def test_start_of_a_whole_instance_has_no_deadline_in_the_ledger_of_fetches() -> None:
    w = make(6.0)
    serving(w)
    later(w)
    [one] = whole(w, LOADING)
    assert w.state.fetches[one.command.instance_id].deadline is None


def test_under_load_whole_instances_start_on_the_devices_of_all_stages_and_share_requests() -> None:
    w = make(6.0, nodes=3, replicas={"min": 0, "max": 2})
    group = serving(w, active=4)
    for _ in range(6):
        w.demand("m", 4, in_flight=4)
        w.tick(0.5)
    ones = whole(w, LOADING)
    assert sorted(node_of(r, w) for r in ones) == sorted(node_of(r, w) for r in group)
    prepares = {e.command.instance_id: e.command.background for e in w.sent(SendPrepare)}
    assert not any(prepares[r.command.instance_id] for r in ones), "requests wait for them"
    ones[0].state = READY
    for _ in range(4):
        w.demand("m", 4, in_flight=4)
        w.tick(0.5)
    assert not orders(w), "one does not suffice, and the group serves"
    ones[1].state = READY
    w.demand("m", 0, in_flight=6)
    w.tick(0.5)
    [first] = orders(w)
    assert first.at_most == 2
    to = next(r for r in ones if r.command.instance_id == first.instance_id)
    group[0].active, to.active = 2, 2
    end(w, first)
    assert not w.stops("m"), "a share has moved, not all"
    for _ in range(4):
        w.demand("m", 0, in_flight=4)
        w.tick(0.5)
    second = orders(w)[-1]
    assert second.at_most is None
    assert second.instance_id != first.instance_id
    group[0].active = 0
    end(w, second)
    assert stopped(w) == {group[0].command.instance_id}
    for _ in range(4):
        w.finish_stops()
        w.demand("m", 0, in_flight=4)
        w.tick(0.5)
    assert sorted(r.command.instance_id for r in w.of("m")) == sorted(r.command.instance_id for r in ones)


def test_load_that_no_longer_waits_at_gateways_is_shared_by_several_instances_too() -> None:
    """Gateways say once that nothing waits, and are silent then."""
    w = make(6.0, nodes=3, replicas={"min": 0, "max": 2})
    group = serving(w, active=4)
    for _ in range(6):
        w.demand("m", 4, in_flight=4)
        w.tick(0.5)
    ones = whole(w, LOADING)
    w.demand("m", 0, in_flight=4)
    for _ in range(20):
        w.tick(0.5)
    assert "m" not in w.state.demand
    assert whole(w, LOADING) == ones, "the group's requests need them"
    ones[0].state = READY
    for _ in range(4):
        w.tick(0.5)
    assert not orders(w), "not all requests move to the first one"
    ones[1].state = READY
    w.tick(0.5)
    [first] = orders(w)
    assert first.at_most == 2
    group[0].active = 0
    for _ in range(8):
        w.tick(0.5)


def test_no_replica_competes_with_the_start_of_a_group() -> None:
    w = make(6.0, nodes=3, replicas={"min": 0, "max": 3})
    for _ in range(8):
        w.demand("m", 9)
        w.tick(0.5)
    assert not whole(w)
    assert len(group_of(w)) == 2


def test_load_that_one_instance_bears_starts_one_although_more_are_allowed() -> None:
    w = make(6.0, replicas={"min": 0, "max": 3})
    serving(w)
    later(w, 10.0)
    assert len(whole(w)) == 1


def test_scheduler_ticks_often_when_a_group_is_due() -> None:
    w = make(6.0)
    group = serving(w)
    ready_at = w.state.instances[group[0].command.instance_id].ready_at or 0.0
    due = ready_at + w.policy.consolidate_after_s
    assert not is_consolidation_due(w.state, due - 1.5, w.policy, 1.0)
    assert is_consolidation_due(w.state, due - 0.5, w.policy, 1.0)
    assert not is_consolidation_due(w.state, due - 0.5, Policy(consolidate=False), 1.0)
