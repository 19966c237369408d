"""Destinations whose migration fails, or ends before it is ordered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.domain.events import MigrationRequested, MigrationUpdated, WaiterCancelled
from shared.contracts.node import InstanceState
from tests.support.fake_node import MIB
from tests.unit.scheduler.fake_agents import Running
from tests.unit.scheduler.world import World

LOADING, READY = InstanceState.LOADING, InstanceState.READY


@pytest.fixture
def world() -> World:
    """Create two nodes, and a model that serves on one of them."""
    world = World()
    world.node("n1", 700 * MIB)
    world.model("a", engine="vllm", memory=600 * MIB, keep_alive=-1)
    world.up("a").active = 2
    world.node("n2", 700 * MIB)
    return world


def request(world: World) -> str:
    """Request that the model's instance moves to n2, as an operator does."""
    (source,) = world.of("a", READY)
    world.send(MigrationRequested(world.now, "operator", source.command.instance_id, node="n2"))
    return source.command.instance_id


def live(world: World) -> list[str]:
    return [i.node for i in world.state.live_instances(world.state.models["a"])]


def occupy(world: World) -> Running:
    """Let another model have the memory of n2, so that a start there waits for it."""
    world.model("b", engine="vllm", memory=600 * MIB)
    occupying = world.up("b")
    world.tick(10.0)
    return occupying


@pytest.mark.parametrize("is_claim", [True, False])
def test_new_leader_stops_the_start_of_a_destination_beyond_replicas_max(world: World, is_claim: bool) -> None:
    if is_claim:
        occupy(world)
    request(world)
    assert live(world) == ["n1", "n2"]
    (destination,) = world.state.on_node("n2")[-1:]
    assert destination.is_claim == is_claim
    world.change_leader()
    assert live(world) == ["n1"]
    world.report()
    world.finish_stops()
    for _ in range(40):
        world.demand("a", 1, in_flight=2)
        world.tick(0.25)
    assert live(world) == ["n1"]
    assert [r.command.device_ids for r in world.of("a")] == [("cpu:0",)]


def test_new_leader_keeps_the_start_of_a_destination_if_its_node_is_drained(world: World) -> None:
    world.change_node("n1", "drain")
    world.tick(0.25)
    (started,) = world.of("a", LOADING)
    world.change_leader()
    world.report()
    world.tick(0.25)
    assert world.of("a", LOADING) == [started]
    assert [m.destination for m in world.state.migrations.values()] == [started.command.instance_id]


def test_new_leader_keeps_the_destination_of_an_ordered_migration(world: World) -> None:
    source = request(world)
    world.get_ready("a")
    (ordered,) = world.state.migrations.values()
    assert ordered.is_ordered
    world.change_leader()
    world.report()
    world.tick(1.0)
    assert live(world) == ["n1", "n2"]
    assert [m.source for m in world.state.migrations.values()] == [source]


def test_new_leader_keeps_the_start_of_a_destination_that_replicas_max_allows(world: World) -> None:
    (model,) = world.state.models.values()
    spec = model.card.spec.model_copy(update={"replicas": model.card.spec.replicas.model_copy(update={"max": 2})})
    world.state.models["a"] = replace(model, card=model.card.model_copy(update={"spec": spec}))
    request(world)
    world.change_leader()
    world.report()
    world.demand("a", 1)
    world.tick(1.0)
    assert live(world) == ["n1", "n2"]


def test_destination_of_a_migration_that_its_operator_gives_up_stops(world: World) -> None:
    request(world)
    world.send(WaiterCancelled(world.now, "operator"))
    world.demand("a", 1, in_flight=2)
    world.tick(0.25)
    assert live(world) == ["n1"]


def ready_destination(world: World) -> Running:
    """Let an operator's migration be ordered; return its destination, which is ready."""
    source = request(world)
    world.get_ready("a")
    (destination,) = [r for r in world.of("a", READY) if r.command.instance_id != source]
    return destination


def end(world: World, state: str) -> None:
    """Let the ordered migration end."""
    (move,) = world.state.migrations.values()
    assert move.record is not None
    world.send(MigrationUpdated(world.now, move.record.model_copy(update={"state": state})))


@pytest.mark.parametrize("is_pinned", [False, True])
def test_ready_destination_beyond_replicas_max_stops_once_its_migration_failed(world: World, *, is_pinned: bool) -> None:
    """Its keep-alive, which may be unlimited, would keep the memory from other models."""
    (model,) = world.state.models.values()
    spec = model.card.spec.model_copy(update={"pin": is_pinned})
    world.state.models["a"] = replace(model, card=model.card.model_copy(update={"spec": spec}))
    ready_destination(world)
    end(world, "failed")
    assert live(world) == ["n1"]


def test_surplus_destination_that_serves_stops_when_it_is_idle(world: World) -> None:
    destination = ready_destination(world)
    destination.active = 1
    world.report()
    end(world, "failed")
    world.tick(0.25)
    assert live(world) == ["n1", "n2"]
    destination.active = 0
    world.report()
    assert live(world) == ["n1"]


def test_surplus_destination_stays_while_requests_wait(world: World) -> None:
    ready_destination(world)
    world.demand("a", 1)
    end(world, "failed")
    assert live(world) == ["n1", "n2"]
    world.demand("a", 0, in_flight=2)
    world.tick(0.25)
    assert live(world) == ["n1"]


def test_new_leader_stops_a_surplus_destination_once_it_knows_the_ordered_migrations(world: World) -> None:
    ready_destination(world)
    ordered = dict(world.state.migrations)
    for is_known in (True, False):
        world.state.migrations.clear()
        if is_known:
            world.state.migrations.update(ordered)
        world.change_leader()
        world.report()
        world.tick(world.policy.demand_grace_s - 0.1)
        assert live(world) == ["n1", "n2"]
        world.tick(1.0)
        assert live(world) == (["n1", "n2"] if is_known else ["n1"])


def test_ready_destination_that_replicas_max_allows_stays(world: World) -> None:
    (model,) = world.state.models.values()
    spec = model.card.spec.model_copy(update={"replicas": model.card.spec.replicas.model_copy(update={"max": 2})})
    world.state.models["a"] = replace(model, card=model.card.model_copy(update={"spec": spec}))
    ready_destination(world)
    end(world, "failed")
    world.tick(1.0)
    assert live(world) == ["n1", "n2"]


def test_destination_that_is_migrated_in_turn_serves_until_that_is_done(world: World) -> None:
    """Its start was for an earlier migration, and two instances are live beyond `replicas.max`."""
    moved = ready_destination(world)
    end(world, "done")
    for running in world.of("a"):
        running.active = 0
    world.finish_stops()
    assert live(world) == ["n2"]
    stops = world.stops("a")
    world.send(MigrationRequested(world.now, "operator", moved.command.instance_id, node="n1"))
    for _ in range(8):
        world.tick(0.25)
    assert sorted(live(world)) == ["n1", "n2"]
    world.get_ready("a")
    world.tick(0.25)
    (move,) = world.state.migrations.values()
    assert move.is_ordered
    assert world.stops("a") == stops
    end(world, "done")
    assert live(world) == ["n1"]
