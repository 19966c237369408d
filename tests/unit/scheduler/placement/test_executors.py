"""Bookings of shared instances: an executor is charged once on each device."""

from __future__ import annotations

from services.scheduler.domain.effects import SendStop
from services.scheduler.domain.state.accounting import booking_of
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import InstanceState
from shared.sizing import ATTACHED_BYTES, Need, need_of
from tests.support.fake_node import MIB, model_info
from tests.unit.scheduler.world import World


def need_of_shared(w: World) -> Need:
    """Register four shared models, and return the need of each."""
    for name in "abcd":
        w.model(name, weights=10 * MIB, isolation="shared")
    return need_of(w.state.models["a"].card)


def test_the_need_of_a_shared_model_leaves_the_process_out(w: World) -> None:
    w.node()
    shared = need_of_shared(w)
    w.model("dedicated", weights=10 * MIB)
    dedicated = need_of(w.state.models["dedicated"].card)
    assert shared.total == dedicated.total - dedicated.runtime + ATTACHED_BYTES
    assert (shared.executor, dedicated.executor) == (dedicated.runtime, 0)


def test_a_device_of_one_executor_and_three_needs_has_room_for_three(w: World) -> None:
    need = one_need()
    w.node(budget=need.executor + 3 * need.total)
    need_of_shared(w)
    for name in "abc":
        w.up(name)
        assert booking_of(w.state, "n1", "cpu:0").executor_bytes == need.executor
    booked = booking_of(w.state, "n1", "cpu:0")
    assert (booked.held_bytes, booked.free_bytes) == (need.executor + 3 * need.total, 0)
    w.demand("d")
    assert len(w.sent(SendStop)) == 1, "one idle instance makes room, not more"


def test_the_executor_stays_booked_without_an_instance(w: World) -> None:
    need = one_need()
    w.node(budget=2 * (need.executor + need.total))
    need_of_shared(w)
    running = w.up("a")
    running.stopped, running.state = True, InstanceState.STOPPED
    w.hear()
    booked = booking_of(w.state, "n1", "cpu:0")
    assert (booked.held_bytes, booked.executor_bytes) == (need.executor, need.executor)


def test_a_device_without_room_for_an_executor_is_not_chosen(w: World) -> None:
    need = one_need()
    w.node("n1", budget=need.executor + need.total - 1)
    w.node("n2", budget=need.executor + need.total)
    need_of_shared(w)
    w.demand("a")
    assert [e.node for e in w.starts("a")] == ["n2"]


def one_need() -> Need:
    spec = ModelSpec(name="a", source="/m/a", isolation="shared")
    return need_of(ModelCard(spec=spec, info=model_info(spec.source, 10 * MIB), created=0))
