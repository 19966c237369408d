"""Bookings of shared instances: an executor is charged once on each device."""

from __future__ import annotations

from services.scheduler.domain.effects import SendStop
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.values import replace
from shared.contracts.loader import DeviceMemory, WeightsOnDevice
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
    w.report()
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


def test_a_model_replaces_an_equal_one_whose_units_are_rounded_to_pages(w: World) -> None:
    """The missing bytes are whole pages; a victim counts with its own whole pages."""
    w.node(budget=512 * MIB)
    for name in "ab":
        w.model(name, weights=9 * MIB, isolation="shared", engine_args={"kv_cache_bytes": 2 * MIB})
        model = w.state.models[name]
        info = model.card.info.model_copy(update={"page_bytes": 14 * MIB})
        w.state.models[name] = replace(model, card=model.card.model_copy(update={"info": info}))
    need = need_of(w.state.models["a"].card)
    budget = need.executor + need.total + 5 * MIB
    w.agents["n1"].budget = budget
    revision = w.state.models["a"].card.info.revision
    figures = {
        "device_id": "cpu:0",
        "total_bytes": budget,
        "reusable_bytes": 0,
        "lent_bytes": 0,
        "copied_bytes": 0,
        "reused_bytes": 0,
    }
    empty = DeviceMemory(**figures, free_bytes=budget, mapped_bytes=0, is_lending=True)
    w.loader("n1", (empty,))
    w.up("a")
    there = WeightsOnDevice(
        weights_id=revision, total_bytes=14 * MIB, missing_bytes=0, read_bytes=0, unmapped_bytes=0, exclusive_bytes=14 * MIB
    )
    w.loader("n1", (empty.model_copy(update={"mapped_bytes": 14 * MIB, "weights": (there,)}),))
    w.tick(5)
    w.demand("b")
    assert [e.command.instance_id for e in w.sent(SendStop)] == [
        i.instance_id for i in w.state.instances.values() if i.model == "a"
    ]
