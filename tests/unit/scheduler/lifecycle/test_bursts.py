"""A burst of requests to a cold model starts several pipeline groups at once."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.domain.effects import OrderMigration
from services.scheduler.domain.events import DemandReceived, MigrationUpdated
from services.scheduler.domain.state.accounting import booking_of
from shared.contracts.demand import Demand
from shared.contracts.loader import LinkStatus
from shared.contracts.migration import MigrationRecord
from shared.contracts.models import Slo
from shared.contracts.node import InstanceState
from tests.support.divided_models import SPEED, make, with_token_time
from tests.support.fake_node import MIB
from tests.unit.scheduler.fake_agents import Running
from tests.unit.scheduler.world import World

READY, LOADING = InstanceState.READY, InstanceState.LOADING


def burst(waiting: int = 4, *, nodes: int = 4, most: int = 3, **options: Any) -> World:
    """Return a world in which requests wait; an instance runs one, and gets one more."""
    w = make(6.0, nodes=nodes, replicas={"min": 0, "max": most}, **options)
    w.demand("m", waiting)
    return w


def groups(w: World) -> dict[str, list[Running]]:
    """Return the stages of each group, by its first one."""
    found: dict[str, list[Running]] = {}
    for r in w.of("m"):
        if r.group is not None:
            found.setdefault(r.group.first, []).append(r)
    return found


def firsts(w: World) -> list[Running]:
    return [r for r in w.of("m", READY) if r.group is not None and r.group.index == 0]


def whole(w: World, *states: InstanceState) -> list[Running]:
    return [r for r in w.of("m", *states) if r.group is None]


def nodes_of(w: World, found: list[Running]) -> list[str]:
    ids = {r.command.instance_id for r in found}
    return sorted(name for name, agent in w.agents.items() for key in agent.instances if key in ids)


def orders(w: World) -> list[MigrationRecord]:
    return [e.record for e in w.sent(OrderMigration)]


def serving(w: World, active: int = 1) -> list[Running]:
    """Let all groups become ready, and each serve as many requests; none waits at a gateway."""
    w.get_ready("m")
    for first in firsts(w):
        first.active = active
    w.report()
    w.demand("m", 0, in_flight=active * len(firsts(w)))
    return firsts(w)


def test_as_many_groups_start_in_one_decision_as_there_are_nodes_for() -> None:
    w = burst()
    assert sorted(len(stages) for stages in groups(w).values()) == [2, 2]
    assert nodes_of(w, w.of("m")) == ["n0", "n1", "n2", "n3"], "each group has links of its own"
    starting = [d for d in w.decisions if d.plans]
    assert [len(d.plans) for d in starting] == [2]
    assert {p.trigger for p in starting[0].plans} == {"demand", "replicas"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"waiting": 2}, 1),
        ({"waiting": 4, "nodes": 8}, 2),
        ({"waiting": 9, "nodes": 8}, 3),
        ({"waiting": 9, "most": 1}, 1),
        ({"waiting": 9, "nodes": 3}, 1),
    ],
    ids=["one group serves it", "two are enough", "replicas.max", "one replica", "no nodes left"],
)
def test_number_of_groups(options: dict[str, Any], expected: int) -> None:
    w = burst(**options)
    for _ in range(4):
        w.demand("m", options["waiting"])
        w.tick(0.25)
    assert len(groups(w)) == expected
    assert not whole(w)


def test_requests_that_arrive_while_the_first_group_starts_get_another_one() -> None:
    w = burst(1)
    assert len(groups(w)) == 1
    w.demand("m", 3)
    assert len(groups(w)) == 2


def test_no_further_group_starts_once_one_is_ready() -> None:
    w = burst(1, nodes=6)
    w.get_ready("m")
    for _ in range(4):
        w.demand("m", 5, in_flight=1)
        w.tick(0.5)
    assert len(groups(w)) == 1
    assert whole(w, LOADING), "whole instances start for what still waits"


def test_place_that_is_not_found_is_looked_for_again_after_a_pause_only() -> None:
    w = burst(3, nodes=3)
    pauses = [c for c in w.state.cooldowns.values() if c.subject.startswith("burst")]
    assert len(pauses) == 1
    w.now += 0.1
    decision = w.send(DemandReceived(w.now, Demand(gateway="g1", model="m", waiting=3), "again"))
    assert not decision.plans
    assert [c for c in w.state.cooldowns.values() if c.subject.startswith("burst")] == pauses
    for n in ("n8", "n9"):
        w.node(n, 1000 * MIB)
        w.loader(n, (), bytes_per_second=1e9, links=(LinkStatus(link="remote:far", bytes_per_second=SPEED),))
    w.demand("m", 3)
    w.tick(1.1)
    w.demand("m", 3)
    assert len(groups(w)) == 2


def test_each_group_becomes_an_instance_if_the_load_needs_them() -> None:
    w = burst(3)
    first, second = serving(w)
    for _ in range(6):
        w.tick(0.5)
    ones = whole(w, LOADING)
    assert len(ones) == 2
    assert len(set(nodes_of(w, ones)) & set(nodes_of(w, w.of("m", READY)))) == 2, "on devices of stages"
    w.get_ready("m")
    w.tick(0.5)
    records = orders(w)
    assert {r.source_instance for r in records} == {first.command.instance_id, second.command.instance_id}
    assert len({r.instance_id for r in records}) == 2, "each has a destination of its own"
    assert [r.at_most for r in records] == [None, None]
    for group, record in zip(firsts(w), sorted(records, key=lambda r: r.source_instance), strict=True):
        group.active = 0
        next(r for r in ones if r.command.instance_id == record.instance_id).active = 1
        w.send(MigrationUpdated(w.now, record.model_copy(update={"state": "done"})))
    for _ in range(4):
        w.finish_stops()
        w.tick(0.5)
    assert w.of("m") == ones
    assert not w.state.later_stages
    held = sum(booking_of(w.state, n, "cpu:0").held_bytes for n in w.agents)
    assert held == sum(r.command.reserve_bytes for r in ones), "the memory of both groups is given back"


def test_groups_become_one_instance_if_the_load_needs_one() -> None:
    w = burst(3)
    first, second = serving(w)
    second.active, second.idle_since, second.completed = 0, w.now, 1
    w.demand("m", 0, in_flight=1)
    for _ in range(12):
        w.tick(0.5)
    [one] = whole(w, LOADING)
    w.get_ready("m")
    w.tick(0.5)
    assert {r.source_instance for r in orders(w)} == {first.command.instance_id}
    assert second.state is InstanceState.DRAINING, "the idle one needs no migrator"
    assert orders(w)[0].instance_id == one.command.instance_id


def test_under_more_load_the_groups_share_the_instances_that_start() -> None:
    w = burst(8, most=2)
    serving(w, active=4)
    for _ in range(6):
        w.demand("m", 4, in_flight=8)
        w.tick(0.5)
    ones = whole(w, LOADING)
    assert len(ones) == 2
    w.get_ready("m")
    w.demand("m", 0, in_flight=8)
    w.tick(0.5)
    records = orders(w)
    assert len({r.source_instance for r in records}) == 2
    assert len({r.instance_id for r in records}) == 2
    assert [r.at_most for r in records] == [None, None], "each instance takes one group's requests"


def test_requests_in_the_queues_of_groups_count_as_waiting() -> None:
    w = burst(4, most=2)
    for first in serving(w):
        first.waiting = 1
    for _ in range(6):
        w.tick(0.5)
    assert len(whole(w, LOADING)) == 2, "although nothing waits at gateways any more"


def test_instance_that_fails_leaves_its_group_serving() -> None:
    w = burst(3)
    serving(w)
    for _ in range(6):
        w.tick(0.5)
    ones = whole(w, LOADING)
    ones[0].state = InstanceState.FAILED
    w.report()
    ones[1].state = READY
    w.report()
    w.tick(0.5)
    assert len(groups(w)) == 2
    assert len(orders(w)) == 1, "the other one takes the requests of its own group"
    assert orders(w)[0].instance_id == ones[1].command.instance_id


def test_full_workers_of_several_groups() -> None:
    w = make(6.0, nodes=4, replicas={"min": 0, "max": 2}, slo=Slo(ttft=6.0, tpot=0.1))
    with_token_time(w, 55.0)
    w.demand("m", 3)
    assert len(groups(w)) == 2
    assert {f.group for f in w.state.full_workers.values()} == set(groups(w))
    serving(w)
    for _ in range(6):
        w.tick(0.5)
    assert len(whole(w, LOADING)) == 2
    used = {f.used_by for f in w.state.full_workers.values()}
    assert used == {r.command.instance_id for r in w.of("m") if r.group is None}, "each instance has used the promise of its group"
