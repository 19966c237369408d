"""Proposals of background rebalancing, and its convergence."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.domain.effects import OrderMigration
from services.scheduler.domain.migration.rebalance import BusyInstance, FreeDevice, propose_move
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World


def test_the_less_busy_of_two_hot_instances_moves_to_an_idle_device() -> None:
    serving = [
        BusyInstance("i", "n1/cpu:0", 10, 8, 8),
        BusyInstance("j", "n1/cpu:0", 10, 5, 8),
        BusyInstance("k", "n2/cpu:0", 10, 1, 8),
    ]
    assert propose_move(serving, [FreeDevice("n2/cpu:0", 50), FreeDevice("n3/cpu:0", 20)]) == ("j", "n3/cpu:0")
    assert propose_move(serving, [FreeDevice("n2/cpu:0", 50), FreeDevice("n3/cpu:0", 5)]) is None


def test_cold_instance_moves_to_a_shared_device_and_frees_its_own() -> None:
    serving = [BusyInstance("i", "n1/cpu:0", 10, 1, 8), BusyInstance("j", "n2/cpu:0", 30, 1, 8)]
    rooms = [FreeDevice("n1/cpu:0", 90), FreeDevice("n2/cpu:0", 70), FreeDevice("n3/cpu:0", 100)]
    assert propose_move(serving, rooms) == ("i", "n2/cpu:0")
    warm = [serving[0], replace(serving[1], active=4)]
    assert propose_move(warm, rooms) is None


DEVICES = [f"n{i}/cpu:0" for i in range(4)]


@given(
    st.lists(st.tuples(st.sampled_from(DEVICES), st.integers(1, 50), st.integers(1, 8)), max_size=10),
    st.integers(min_value=200, max_value=600),
)
def test_rebalancing_converges(drawn: list[tuple[str, int, int]], budget: int) -> None:
    serving = [BusyInstance(f"i{n}", device, nbytes, active, 8) for n, (device, nbytes, active) in enumerate(drawn)]
    for _ in range(60):
        held = {d: sum(s.nbytes for s in serving if s.device == d) for d in DEVICES}
        move = propose_move(serving, [FreeDevice(d, budget - held[d]) for d in DEVICES])
        if move is None:
            return
        (mover,) = [s for s in serving if s.instance_id == move[0]]
        assert mover.device != move[1]
        assert mover.nbytes <= budget - held[move[1]]
        serving = [replace(s, device=move[1]) if s is mover else s for s in serving]
    raise AssertionError("it never ends")


def crowded(every: float) -> World:
    world = World()
    world.policy = replace(world.policy, rebalance_period_s=every)
    world.node("n1", budget=700 * MIB)
    for name in ("a", "b"):
        world.model(name, 50 * MIB, max_concurrency=2)
        world.up(name).active = 2
    world.node("n2", budget=700 * MIB)
    return world


def test_two_hot_models_are_spread() -> None:
    world = crowded(5.0)
    world.tick(0.25)
    (move,) = world.state.migrations.values()
    assert (move.reason, move.node) == ("rebalance", "n2")
    world.tick(0.25)
    world.get_ready()
    assert len(world.sent(OrderMigration)) == 1
    assert not world.stops("a")
    assert not world.stops("b"), "it is stopped when its requests have moved"


def test_rebalancing_is_off_by_default() -> None:
    world = crowded(0.0)
    world.tick(0.25)
    world.tick(60.0)
    assert not world.state.migrations
