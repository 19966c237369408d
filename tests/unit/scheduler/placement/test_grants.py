"""Late binding: which devices a start is granted, and bookings that follow the node's choice."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.domain.effects import SendPrepare
from services.scheduler.domain.events import NodeStatusReceived
from services.scheduler.domain.state.accounting import booking_of
from shared.contracts.node import InstanceState
from shared.errors import EngineFailed
from shared.sizing import need_of
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World

DEVICES = ("cpu:0", "cpu:1", "cpu:2")


def shared_models(w: World, *names: str, budget: int = 2000 * MIB, **options: Any) -> None:
    w.node(budget=budget, devices=DEVICES)
    for name in names:
        w.model(name, weights=10 * MIB, isolation="shared", **options)


def bind(w: World, model: str, device_id: str, rule: str = "quiet") -> None:
    """Let the node report that it has bound the model's start to a device."""
    agent = w.agents["n1"]
    [running] = w.of(model)
    running.command = running.command.model_copy(update={"device_ids": (device_id,)})
    status = agent.status(w.now)
    bound = [i.model_copy(update={"bound_by": rule}) if i.model == model else i for i in status.instances]
    w.send(NodeStatusReceived(w.now, status.model_copy(update={"instances": tuple(bound)})))


def test_a_shared_start_is_granted_the_other_devices_of_its_node(w: World) -> None:
    shared_models(w, "a")
    w.node("n2", devices=("cpu:0",), budget=10 * MIB)
    w.demand("a")
    [start] = w.starts("a")
    assert {*start.command.device_ids, *start.command.grant} == set(DEVICES)
    assert w.sent(SendPrepare) == [], "the node sends it, once it has chosen the device"


@pytest.mark.parametrize("options", [{"isolation": "dedicated"}, {"isolation": "shared", "placement": {"devices": ["cpu:1"]}}])
def test_starts_that_may_run_on_one_device_only_are_granted_none(w: World, options: dict[str, Any]) -> None:
    w.node(budget=2000 * MIB, devices=DEVICES)
    w.model("a", weights=10 * MIB, **options)
    w.demand("a")
    [start] = w.starts("a")
    assert start.command.grant == ()
    assert [p.command.device for p in w.sent(SendPrepare)] == [start.command.device_ids[0]]


def test_devices_without_room_are_not_granted(w: World) -> None:
    need = one_need(w)
    for name in "bcd":
        w.model(name, weights=10 * MIB, isolation="shared")
    for name in "bc":
        w.demand(name)
        w.get_ready(name)
    taken = {r.command.device_ids[0] for name in "bc" for r in w.of(name)}
    w.agents["n1"].budget = need.executor + need.total
    w.report()
    w.demand("d")
    [start] = w.starts("d")
    assert not taken & {*start.command.device_ids, *start.command.grant}


def test_bookings_and_the_plan_follow_the_device_that_the_node_has_chosen(w: World) -> None:
    shared_models(w, "a")
    need = need_of(w.state.models["a"].card)
    w.demand("a")
    [start] = w.starts("a")
    planned, chosen = start.command.device_ids[0], start.command.grant[0]
    assert booking_of(w.state, "n1", planned).held_bytes == need.total + need.executor
    bind(w, "a", chosen)
    assert booking_of(w.state, "n1", planned).held_bytes == 0
    assert booking_of(w.state, "n1", chosen).held_bytes == need.total + need.executor
    plan = w.state.plans[start.command.plan_id]
    assert plan.chosen is not None
    assert plan.chosen.device_ids == (chosen,)
    assert f"its node bound it to {chosen} (quiet)" in plan.reason
    bind(w, "a", chosen)
    assert w.state.plans[start.command.plan_id].reason.count("bound") == 1, "once"
    w.get_ready("a")
    [instance] = w.state.instances.values()
    assert (instance.device_ids, instance.state) == ((chosen,), InstanceState.READY)
    assert w.state.plans[start.command.plan_id].outcome == "ready"


def test_a_start_that_fails_where_the_node_bound_it_avoids_that_device(w: World) -> None:
    shared_models(w, "a")
    w.demand("a")
    [start] = w.starts("a")
    chosen = start.command.grant[0]
    bind(w, "a", chosen)
    w.fail("a", EngineFailed("its executor died").body())
    again = w.starts("a")[-1].command
    assert again.instance_id != start.command.instance_id
    assert chosen not in {*again.device_ids, *again.grant}


def test_an_agent_that_dies_before_it_binds_loses_no_demand_and_no_memory(w: World) -> None:
    """The start was granted; the next agent has no record of it."""
    shared_models(w, "a")
    w.demand("a")
    [start] = w.starts("a")
    agent = w.agents["n1"]
    agent.instances.clear()
    agent.boot, agent.seq = "boot-2", 1
    w.tick(60)
    again = w.starts("a")[-1].command
    assert again.instance_id != start.command.instance_id
    need = need_of(w.state.models["a"].card)
    held = sum(booking_of(w.state, "n1", d).held_bytes for d in DEVICES)
    assert held == need.total + need.executor


def test_a_report_without_a_binding_moves_no_booking(w: World) -> None:
    shared_models(w, "a")
    w.demand("a")
    [start] = w.starts("a")
    w.report()
    [instance] = w.state.instances.values()
    assert instance.device_ids == start.command.device_ids


def one_need(w: World) -> Any:
    shared_models(w, "a")
    return need_of(w.state.models["a"].card)
