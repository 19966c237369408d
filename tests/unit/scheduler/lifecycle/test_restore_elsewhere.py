"""A suspended instance is restored onto another free device of its kind when its own is taken."""

from __future__ import annotations

from services.scheduler.domain.effects import SendResume
from services.scheduler.domain.state.accounting import booking_of
from shared.contracts.node import InstanceState
from tests.support.fake_node import MIB
from tests.unit.scheduler.fake_agents import Running
from tests.unit.scheduler.world import World

SUSPENDED, RESUMING = InstanceState.SUSPENDED, InstanceState.RESUMING
NEED = 324 * MIB
"""Reservation of a model with 100 MiB of weights."""
ONE = NEED + 100 * MIB


def suspended(w: World, *, moves_to: tuple[str, ...], left: int = 0) -> Running:
    """Suspend an instance of model a, and let b serve on its device."""
    w.node(budget=ONE, devices=("cuda:0", "cuda:1"))
    w.model("a")
    running = w.up("a")
    w.can_suspend(running, left=left)
    running.suspension = running.suspension.model_copy(update={"way": "cuda", "moves_to": moves_to})
    w.report()
    w.sleep("a")
    w.finish_stops()
    assert running.state is SUSPENDED
    return running


def occupy(w: World, model: str, device: str) -> None:
    w.model(model, placement={"devices": [device]})
    busy = w.up(model)
    busy.active = 1
    w.report()
    assert busy.command.device_ids == (device,)


def test_a_taken_device_is_replaced_by_a_free_one_of_its_kind(w: World) -> None:
    running = suspended(w, moves_to=("cuda:1",))
    occupy(w, "b", "cuda:0")
    w.demand("a")
    [resume] = w.sent(SendResume)
    assert resume.command.device_ids == ("cuda:1",)
    assert running.state is RESUMING
    assert booking_of(w.state, "n1", "cuda:1").free_bytes == ONE - NEED
    w.get_ready("a")
    [instance] = [i for i in w.state.instances.values() if i.model == "a"]
    assert (instance.device_ids, instance.state) == (("cuda:1",), InstanceState.READY)
    plan = w.state.plans[instance.plan_id]
    assert (plan.way, plan.chosen.device_ids if plan.chosen else ()) == ("restore", ("cuda:1",))
    assert "its device has no room, and it is restored onto n1/cuda:1" in plan.reason


def test_a_device_with_room_keeps_its_snapshot(w: World) -> None:
    suspended(w, moves_to=("cuda:1",))
    w.demand("a")
    [resume] = w.sent(SendResume)
    assert resume.command.device_ids == ()


def test_without_a_device_to_move_to_the_model_is_loaded_elsewhere(w: World) -> None:
    running = suspended(w, moves_to=())
    occupy(w, "b", "cuda:0")
    w.demand("a")
    assert not w.sent(SendResume)
    assert [s.command.device_ids for s in w.starts("a")][-1] == ("cuda:1",)
    assert running.state is SUSPENDED


def test_a_full_device_is_not_cleared_for_a_move(w: World) -> None:
    suspended(w, moves_to=("cuda:1",))
    occupy(w, "b", "cuda:0")
    occupy(w, "c", "cuda:1")
    w.demand("a")
    assert not w.sent(SendResume)


def test_a_move_that_the_node_refuses_is_followed_by_a_load(w: World) -> None:
    """The latest report named the device; the node has learned meanwhile that it cannot be used."""
    running = suspended(w, moves_to=("cuda:1",))
    occupy(w, "b", "cuda:0")
    running.suspension = running.suspension.model_copy(update={"moves_to": ()})
    w.demand("a")
    assert len(w.sent(SendResume)) == 1
    instance = w.state.instances[running.command.instance_id]
    assert (instance.state, instance.device_ids) == (SUSPENDED, ("cuda:0",))
    w.tick(1.0)
    assert len(w.sent(SendResume)) == 1
    assert w.starts("a")[-1].command.device_ids == ("cuda:1",)
