"""A snapshot restored onto another device of the node: reserved there first, and recorded."""

from __future__ import annotations

import pytest

from services.nodeagent.domain import events as e
from services.nodeagent.domain.state import Process
from services.nodeagent.domain.status import suspension
from shared.contracts.base import ErrorBody
from shared.contracts.node import InstanceState, ResumeInstance
from shared.errors import EngineFailed, InsufficientMemory, RestoreFailed
from tests.unit.nodeagent.world import EPOCH, ERROR, POSSIBLE, World, start, stop

RESUMING, SUSPENDED = InstanceState.RESUMING, InstanceState.SUSPENDED
GPUS = ("cuda:0", "cuda:1", "cuda:2")
MOVABLE = POSSIBLE.model_copy(update={"way": "cuda", "moves_to": ("cuda:1",)})


def suspended(w: World, left: int = 0) -> None:
    w.ready(devices=("cuda:0",))
    w.receive(e.Assessed("i", MOVABLE, 60))
    w.suspended_again("i", left)


def resume(*devices: str, wait_ms: int = 0) -> ResumeInstance:
    return ResumeInstance(token=EPOCH, plan_id="p2", instance_id="i", device_ids=devices, wait_ms=wait_ms)


def error_of(effects: tuple[e.Effect, ...]) -> ErrorBody | None:
    (reply,) = [x for x in effects if isinstance(x, e.Reply)]
    return reply.error


@pytest.fixture
def w() -> World:
    return World(*GPUS, snapshots=1000)


def booked(w: World) -> list[int]:
    return [w.state.ledger.sum_reserved(d) for d in GPUS]


def test_the_memory_of_the_new_device_is_booked_and_the_old_one_is_free(w: World) -> None:
    suspended(w)
    effects = w.receive(e.ResumeCommand(resume("cuda:1"), 3))
    assert error_of(effects) is None
    assert e.Resume("i", "cuda") in effects
    assert booked(w) == [0, 60, 0]
    assert w["i"].command.device_ids == ("cuda:1",)
    assert w["i"].suspend_state.moved_from == ("cuda:0",), "the record says which devices the snapshot is of"
    w.receive(e.Resumed("i", 60), 0.2)
    assert w["i"].state is InstanceState.READY
    assert not w["i"].suspend_state.moved_from


def test_a_resume_without_other_devices_is_as_before(w: World) -> None:
    for devices in ((), ("cuda:0",)):
        w = World(*GPUS, snapshots=1000)
        suspended(w)
        assert error_of(w.receive(e.ResumeCommand(resume(*devices), 3))) is None
        assert w["i"].command.device_ids == ("cuda:0",)
        assert w["i"].suspend_state.moved_from == ()


@pytest.mark.parametrize("devices", [("cuda:2",), ("cuda:1", "cuda:2"), ("cpu:0",)], ids=["other kind", "two", "no GPU"])
def test_a_device_that_the_snapshot_cannot_go_to_is_refused(w: World, devices: tuple[str, ...]) -> None:
    suspended(w)
    refused = error_of(w.receive(e.ResumeCommand(resume(*devices), 3)))
    assert refused is not None
    assert (refused.code, "only onto cuda:0, cuda:1" in refused.message) == (RestoreFailed.code, True)
    assert w["i"].state is SUSPENDED
    assert booked(w) == [0, 0, 0]


def test_memory_that_is_left_on_the_old_device_forbids_a_move(w: World) -> None:
    suspended(w, left=10)
    assert suspension(w.state, w["i"]).moves_to == ()
    refused = error_of(w.receive(e.ResumeCommand(resume("cuda:1"), 3)))
    assert refused is not None
    assert refused.code == RestoreFailed.code
    assert booked(w) == [10, 0, 0]


def test_the_status_names_the_devices(w: World) -> None:
    suspended(w)
    assert suspension(w.state, w["i"]).moves_to == ("cuda:1",)


def test_a_full_new_device_refuses_or_lets_the_move_wait(w: World) -> None:
    suspended(w)
    w.ready("j", pid=8, reserve=80, devices=("cuda:1",))
    refused = error_of(w.receive(e.ResumeCommand(resume("cuda:1"), 3)))
    assert refused is not None
    assert refused.code == InsufficientMemory.code
    assert w["i"].command.device_ids == ("cuda:0",)
    assert error_of(w.receive(e.ResumeCommand(resume("cuda:1", wait_ms=5000), 4))) is None
    assert w["i"].command.device_ids == ("cuda:0",), "it has no memory there yet"
    w.receive(e.StopCommand(stop("j"), 5))
    w.receive(e.EngineExited("j", 8, 0, ERROR))
    w.receive(e.WeightsReleased("j", 1))
    effects = w.receive(e.MemoryFreed("j", 1))
    assert e.Resume("i", "cuda") in effects
    assert (w["i"].command.device_ids, w["i"].suspend_state.moved_from) == (("cuda:1",), ("cuda:0",))
    assert booked(w) == [0, 60, 0]


def test_a_move_that_the_driver_refuses_ends_in_a_load_on_the_new_device(w: World) -> None:
    suspended(w)
    w.receive(e.ResumeCommand(resume("cuda:1"), 3))
    w.receive(e.ResumeFailed("i", RestoreFailed("restore of pid 7 failed: CUDA_ERROR_NOT_SUPPORTED").body()))
    effects = w.receive(e.EngineExited("i", 7, -9, EngineFailed("killed").body()))
    assert e.Fork("i") in effects
    assert w["i"].process is Process.FORKING
    assert w["i"].command.device_ids == ("cuda:1",)
    assert booked(w) == [0, 60, 0]
    assert w["i"].suspend_state.moved_from == ()
    fell_back = w["i"].suspend_state.fell_back
    assert fell_back is not None
    assert fell_back.code == RestoreFailed.code


def test_an_instance_that_was_moved_can_be_started_on_its_old_device(w: World) -> None:
    suspended(w)
    w.receive(e.ResumeCommand(resume("cuda:1"), 3))
    w.receive(e.Resumed("i", 60))
    assert error_of(w.receive(e.StartCommand(start("j", reserve=100, devices=("cuda:0",)), 9))) is None
    assert booked(w) == [100, 60, 0]
