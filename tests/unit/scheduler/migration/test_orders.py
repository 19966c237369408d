"""Migration orders: request, destination, record, and end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.scheduler.domain.effects import OrderMigration
from services.scheduler.domain.estimates.migration_times import PAIRS_KEPT, migration_times_between
from services.scheduler.domain.events import MigrationRequested, MigrationUpdated, WaiterCancelled
from services.scheduler.domain.placement.migration_targets import migration_targets
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.state.migrations import MigrationTimes
from services.scheduler.domain.state.transaction import Transaction
from shared.contracts.admin import MigrationsViewed
from shared.contracts.base import ErrorBody
from shared.contracts.migration import MigrationRecord, MigrationRound, MovedRequest
from shared.contracts.node import InstanceState
from tests.support.fake_node import MIB
from tests.unit.scheduler.fake_agents import Running
from tests.unit.scheduler.world import World


def serving(world: World, model: str = "a", active: int = 2) -> Running:
    running = world.up(model)
    running.active = active
    world.report()
    return running


@pytest.fixture
def world() -> World:
    """Create two nodes, and a model whose engines can resume each other's responses."""
    world = World()
    world.node("n1", budget=5000 * MIB), world.node("n2", budget=5000 * MIB)
    world.model("a", engine="vllm")
    return world


def ask(world: World, instance: Running, **fields: Any) -> str:
    waiter = world._waiter()
    world.send(MigrationRequested(world.now, waiter, instance.command.instance_id, **fields))
    return waiter


def orders(world: World) -> list[MigrationRecord]:
    return [e.record for e in world.sent(OrderMigration)]


def node_of(world: World, instance_id: str) -> str:
    return world.state.instances[instance_id].node


def end(world: World, record: MigrationRecord, state: str = "done", **fields: Any) -> None:
    world.send(MigrationUpdated(world.now, record.model_copy(update={"state": state, **fields})))


def other(world: World, running: Running) -> str:
    return "n2" if node_of(world, running.command.instance_id) == "n1" else "n1"


def test_destination_is_started_then_migration_ordered_then_source_stopped(world: World) -> None:
    source = serving(world)
    to = other(world, source)
    waiter = ask(world, source, node=to)
    assert not orders(world), "its destination is not ready yet"
    (started,) = world.of("a", InstanceState.LOADING)
    assert node_of(world, started.command.instance_id) == to
    for _ in range(40):  # longer than an unwanted start lasts
        world.tick(0.25)
    assert world.of("a", InstanceState.LOADING)
    world.get_ready("a")
    (record,) = orders(world)
    assert (record.source_instance, record.instance_id) == (source.command.instance_id, started.command.instance_id)
    assert record.request_id is None
    assert not world.stops("a"), "an operator's move may fail; then the source continues"
    world.tick(30.0)
    assert world.answer(waiter) is None
    end(world, record)
    assert isinstance(world.answer(waiter), MigrationsViewed)
    assert [s.command.instance_id for s in world.stops("a")] == [source.command.instance_id]


def test_existing_ready_instance_is_used_as_destination(world: World) -> None:
    world.model("a", engine="vllm", replicas={"min": 2, "max": 2})
    world.tick(0.1)
    world.get_ready("a")
    source, there = world.of("a", InstanceState.READY)
    source.active = 1
    world.report()
    waiter = ask(world, source, request_id="q")
    (record,) = orders(world)
    assert record.instance_id == there.command.instance_id
    assert record.request_id == "q"
    end(world, record, requests=(MovedRequest(request_id="q-1", outcome="moved"),))
    assert isinstance(world.answer(waiter), MigrationsViewed)
    assert not world.stops("a"), "one request has moved, not what else it serves"


def test_without_waiting_the_order_is_the_answer(world: World) -> None:
    source = serving(world)
    waiter = ask(world, source, wait=False)
    assert world.answer(waiter) is None
    world.get_ready("a")
    answer = world.answer(waiter)
    assert answer.migrations == tuple(orders(world))


def test_failed_migration_leaves_the_source_running(world: World) -> None:
    source = serving(world)
    waiter = ask(world, source)
    world.get_ready("a")
    end(world, orders(world)[0], "failed", error=ErrorBody(code="unreachable", message="gone"))
    assert world.answer(waiter).migrations[0].state == "failed"
    assert [s.command.instance_id for s in world.stops("a")] == [orders(world)[0].instance_id]
    world.model("b")
    assert world.state.migrations == {}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"node": "n9"}, "not_found"),
        ({"node": "n1", "device": "cpu:9"}, "not_found"),
        ({"device": "cpu:0"}, "invalid_request"),
    ],
)
def test_invalid_migration_request_is_refused(world: World, fields: dict[str, str], code: str) -> None:
    assert world.answer(ask(world, serving(world), **fields)).code == code


def test_migration_of_an_unmovable_instance_is_refused(world: World) -> None:
    world.model("c", engine="ollama")
    assert world.answer(ask(world, serving(world, "c"))).code == "unsupported_parameter"
    source = serving(world)
    assert world.answer(ask(world, source, node=node_of(world, source.command.instance_id))).code == "invalid_request"
    world.send(MigrationRequested(world.now, "gone", "i-none"))
    assert world.answer("gone").code == "not_found"
    ask(world, source)
    assert "just being moved (" in world.answer(ask(world, source)).message
    (started,) = world.of("a", InstanceState.LOADING)
    world.get_ready("a")
    assert "being moved to" in world.answer(ask(world, started)).message


def test_an_operator_s_migration_without_room_is_refused(world: World) -> None:
    source = serving(world)
    world.agents[other(world, source)].budget = 0
    world.report()
    answer = world.answer(ask(world, source, node=other(world, source)))
    assert answer.code == "insufficient_memory"
    assert world.state.migrations == {}


def test_destination_that_fails_to_start_is_reported(world: World) -> None:
    source = serving(world)
    waiter = ask(world, source)
    for r in world.of("a", InstanceState.LOADING):
        r.state, r.error = InstanceState.FAILED, ErrorBody(code="engine_failed", message="no libraries")
    world.report()
    world.tick(0.25)
    assert "no libraries" in world.answer(waiter).message


def test_cancelled_migration_request_orders_nothing(world: World) -> None:
    source = serving(world)
    waiter = ask(world, source)
    world.send(WaiterCancelled(world.now, waiter))
    world.get_ready("a")
    assert not orders(world)


def test_drain_migrates_the_running_requests_of_a_node(world: World) -> None:
    source = serving(world)
    here = node_of(world, source.command.instance_id)
    world.change_node(here, "drain")
    world.tick(0.25)
    (started,) = world.of("a", InstanceState.LOADING)
    assert node_of(world, started.command.instance_id) != here
    assert not world.stops("a"), "nothing could take its requests yet"
    world.get_ready("a")
    (record,) = orders(world)
    assert record.reason == "drain"
    (stop,) = world.stops("a")
    assert (stop.command.instance_id, stop.command.only_if_idle) == (source.command.instance_id, False)
    source.active = 0
    world.finish_stops()
    end(world, record)
    world.tick(1.0)
    assert [r.command.instance_id for r in world.of("a")] == [started.command.instance_id]


def test_drained_instance_that_turns_out_busy_migrates_to_its_replacement(world: World) -> None:
    """Its node reported it idle; the replacement starts before the node refuses the stop."""
    source = serving(world, active=0)
    here = node_of(world, source.command.instance_id)
    world.demand("a", 1)
    source.active = 1
    world.change_node(here, "drain")
    (replacement,) = (r for r in world.of("a") if r is not source)
    assert node_of(world, replacement.command.instance_id) != here
    world.get_ready("a")
    world.tick(0.25)
    (record,) = orders(world)
    assert (record.source_instance, record.instance_id) == (source.command.instance_id, replacement.command.instance_id)
    assert len(world.of("a")) == 2, "nothing else is started for the migration"


def test_drain_waits_for_room_until_its_timeout(world: World) -> None:
    source = serving(world)
    here, there = node_of(world, source.command.instance_id), other(world, source)
    world.agents[there].budget = 0
    world.report()
    world.change_node(here, "drain")
    for _ in range(20):
        world.tick(0.5)
    assert not orders(world)
    assert not world.stops("a")
    (move,) = world.state.migrations.values()
    assert "no device has room" in move.waiting_reason
    world.tick(world.policy.drain_timeout_s)
    assert [s.command.instance_id for s in world.stops("a")] == [source.command.instance_id]


def test_drained_instance_that_cannot_move_may_finish(world: World) -> None:
    world.model("c", engine="ollama")
    source = serving(world, "c")
    world.change_node(node_of(world, source.command.instance_id), "drain")
    world.tick(0.25)
    assert not world.state.migrations
    assert not world.stops("c")


def test_a_drains_failed_move_is_tried_again_after_a_while(world: World) -> None:
    source = serving(world)
    world.change_node(node_of(world, source.command.instance_id), "drain")
    world.tick(0.25)
    world.get_ready("a")
    end(world, orders(world)[0], "failed")
    world.tick(1.0)
    assert len(orders(world)) == 1


def test_new_leader_continues_ordered_migrations(world: World) -> None:
    source = serving(world)
    ask(world, source)
    world.get_ready("a")
    (record,) = orders(world)
    for key in list(world.state.migrations):
        del world.state.migrations[key]  # as a leader that has just read its state back
    world.send(MigrationUpdated(world.now, record))
    (move,) = world.state.migrations.values()
    assert move.destination == record.instance_id
    end(world, record)
    assert [s.command.instance_id for s in world.stops("a")] == [source.command.instance_id]


def test_migration_end_that_no_leader_received_is_applied_later(world: World) -> None:
    source = serving(world)
    ask(world, source)
    world.get_ready("a")
    (record,) = orders(world)
    world.state.migrations.clear()
    end(world, record)
    assert [s.command.instance_id for s in world.stops("a")] == [source.command.instance_id]
    end(world, record)
    assert len(world.stops("a")) == 1


def test_round_times_are_learned_and_passed_to_the_migrator(world: World) -> None:
    source = serving(world)
    ask(world, source)
    world.get_ready("a")
    rounds = tuple(
        MigrationRound(request_id="q", number=i, tokens=tokens, took_ms=0.2 * tokens + 10, gap=1)
        for i, tokens in enumerate((1000, 20, 5, 800, 10, 3, 1200, 8, 2, 900, 4))
    )
    end(world, orders(world)[0], "failed", rounds=rounds)
    times = world.state.migration_times["a"]
    assert isinstance(times, MigrationTimes)
    assert times.per_token.value == pytest.approx(0.0002, rel=0.3)
    assert times.fixed.value == pytest.approx(0.010, rel=0.5)
    world.finish_stops()  # of the destination
    world.tick(10.0)
    ask(world, source)
    world.get_ready("a")
    again = orders(world)[-1]
    between = times.find_between(again.source_node, again.node)
    assert again.ms_per_token == pytest.approx(between.per_token.value * 1e3)
    assert again.ms_per_token == pytest.approx(0.2, rel=0.3)


def test_times_between_two_nodes_are_learned_apart_from_the_models(world: World) -> None:
    source = serving(world)
    ask(world, source)
    world.get_ready("a")
    (record,) = orders(world)

    def rounds(ms_per_token: float) -> tuple[MigrationRound, ...]:
        lengths = (1000, 20, 5, 800, 10, 3, 1200, 8, 2, 900, 4)
        return tuple(
            MigrationRound(request_id="q", number=i, tokens=tokens, took_ms=ms_per_token * tokens + 10, gap=1)
            for i, tokens in enumerate(lengths)
        )

    def learn(source_node: str, node: str, ms_per_token: float) -> None:
        for _ in range(3):
            there = {"migration_id": f"{source_node}-{node}", "source_node": source_node, "node": node}
            world.send(MigrationUpdated(world.now, record.model_copy(update=there)))
            end(world, record.model_copy(update=there), "failed", rounds=rounds(ms_per_token))

    learn("fast", "near", 0.2)
    learn("fast", "far", 2.0)
    near = migration_times_between(world.state, "a", "fast", "near")
    far = migration_times_between(world.state, "a", "fast", "far")
    anywhere = migration_times_between(world.state, "a", "fast")
    assert near.per_token.value == pytest.approx(0.0002, rel=0.3)
    assert far.per_token.value == pytest.approx(0.002, rel=0.3)
    assert near.per_token.value < anywhere.per_token.value
    assert migration_times_between(world.state, "a", "near", "fast") == replace(anywhere, pairs=())
    assert not migration_times_between(world.state, "b", "fast", "near").is_known


def test_the_pairs_of_nodes_whose_times_are_kept_are_bounded(world: World) -> None:
    source = serving(world)
    ask(world, source)
    world.get_ready("a")
    (record,) = orders(world)
    sample = (MigrationRound(request_id="q", number=0, tokens=1000, took_ms=200, gap=1),)
    for n in range(PAIRS_KEPT + 3):
        there = record.model_copy(update={"migration_id": f"m-{n}", "node": f"n{n}"})
        world.send(MigrationUpdated(world.now, there))
        end(world, there, "failed", rounds=sample)
    pairs = world.state.migration_times["a"].pairs
    assert len(pairs) == PAIRS_KEPT
    assert pairs[-1].destination == f"n{PAIRS_KEPT + 2}"


def test_migration_destination_is_not_evicted(world: World) -> None:
    source = serving(world)
    to = other(world, source)
    ask(world, source, node=to)
    world.get_ready("a")
    for name, agent in world.agents.items():
        agent.budget = agent.reserved("cpu:0") if name == to else 0
    world.report()
    world.tick(5.0)
    world.model("b")
    world.demand("b")
    world.tick(1.0)
    assert not world.stops("a")


def crowded() -> World:
    """Create a small model on the only device that fits the large one.

    The small one fits elsewhere too.
    """
    world = World()
    world.node("big", budget=600 * MIB)
    world.model("small", 100 * MIB)
    serving(world, "small")
    world.node("little", budget=400 * MIB)
    return world


def test_requests_migrate_to_make_room_for_a_larger_model() -> None:
    world = crowded()
    (small,) = world.of("small")
    world.model("large", 350 * MIB)
    world.demand("large", 1)
    plan = world.state.last_plan_of("large")
    assert plan is not None
    assert plan.chosen is not None
    assert (plan.chosen.node, plan.chosen.clearing) == ("big", "migrate")
    (stop,) = world.stops("small")
    assert (stop.command.instance_id, stop.command.only_if_idle) == (small.command.instance_id, False)
    world.tick(0.25)
    world.get_ready("small")
    (record,) = orders(world)
    assert (record.reason, record.plan_id, record.node) == ("placement", plan.plan_id, "little")
    destination = world.state.last_plan_of("small")
    assert destination is not None
    assert (destination.trigger, destination.caused_by) == ("migrate", plan.plan_id)
    small.active = 0
    world.finish_stops()
    end(world, record)
    world.tick(0.25)
    assert world.of("large", InstanceState.LOADING)
    assert [node_of(world, r.command.instance_id) for r in world.of("small")] == ["little"]


WIDE = {"engine": "vllm", "engine_args": {"tensor_parallel_size": 2}}


def wide_victim(*nodes: tuple[str, int, int], big: tuple[int, int] = (2, 600 * MIB)) -> World:
    """A model over two devices of "big" serves where a larger one would have to start.

    Args:
        nodes: Further nodes: name, devices, and bytes of each.
        big: Devices of "big", and bytes of each.
    """
    world = World()
    world.node("big", big[1], devices=tuple(f"cuda:{n}" for n in range(big[0])))
    world.model("wide", 200 * MIB, memory=700 * MIB, **WIDE)
    serving(world, "wide")
    for name, devices, size in nodes:
        world.node(name, size, devices=tuple(f"cuda:{n}" for n in range(devices)))
    world.model("large", 300 * MIB, memory=550 * MIB, engine="vllm", placement={"labels": {}, "devices": ["big/*"]})
    return world


def ways_of(world: World, device: str = "cuda:0") -> list[tuple[str, int]]:
    """Return destinations for the victim's requests, each with its free bytes."""
    (wide,) = world.of("wide")
    draft = Transaction(world.state, world.now, world.policy)
    instance = world.state.instances[wide.command.instance_id]
    found = migration_targets(draft, instance, world.state.models["wide"], booking_of(world.state, "big", device))
    return [(m.device, m.free_bytes) for m in found]


def test_single_device_is_no_destination_for_a_multi_device_instance() -> None:
    """A multi-device victim has no destination on a single device with enough room.

    The scheduler drains no instance without a destination: the larger model waits, or preempts at
    its time.
    """
    world = wide_victim(("single", 1, 2000 * MIB))
    assert ways_of(world) == []
    world.demand("large", 1)
    world.tick(0.25)
    assert not world.stops("wide")
    assert not world.state.migrations


def test_node_is_a_destination_if_each_of_enough_devices_has_room() -> None:
    world = wide_victim(("narrow", 2, 340 * MIB), ("single", 1, 2000 * MIB), ("twin", 2, 400 * MIB), ("three", 3, 380 * MIB))
    assert sorted(ways_of(world)) == [("three/", 380 * MIB), ("twin/", 400 * MIB)]


def test_device_to_be_emptied_is_not_a_destination() -> None:
    assert ways_of(wide_victim(big=(3, 800 * MIB))) == [("big/", 450 * MIB)]
    assert ways_of(wide_victim(big=(2, 800 * MIB))) == []


def test_requests_over_several_devices_move_to_several() -> None:
    world = wide_victim(("twin", 2, 400 * MIB))
    world.demand("large", 1)
    (stop,) = world.stops("wide")
    assert stop.node == "big"
    world.tick(0.25)
    (destination,) = [r for r in world.of("wide") if node_of(world, r.command.instance_id) == "twin"]
    assert destination.command.device_ids == ("cuda:0", "cuda:1")
    world.get_ready("wide")
    (record,) = orders(world)
    assert (record.reason, record.node, record.instance_id) == ("placement", "twin", destination.command.instance_id)


def test_placement_rules_apply_to_the_destination_of_requests() -> None:
    world = crowded()
    world.model("small", 100 * MIB, placement={"devices": ["big/*"]})
    world.model("large", 350 * MIB)
    world.demand("large", 1)
    assert not world.state.migrations


def test_without_the_migrate_capability_the_model_waits_to_preempt() -> None:
    world = crowded()
    world.policy = replace(world.policy, capabilities=frozenset({"preempt"}))
    world.model("large", 350 * MIB)
    world.demand("large", 1)
    world.tick(0.25)
    assert not world.stops("small")
    assert not world.state.migrations
