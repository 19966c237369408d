"""Booked memory of a start after a measurement, and its part on each device."""

from __future__ import annotations

from typing import Any

from services.scheduler.domain.effects import SendResume
from services.scheduler.domain.estimates.memory_needs import start_bytes
from services.scheduler.domain.state.accounting import booking_of
from shared.contracts.node import InstanceState
from shared.sizing import need_of
from tests.support.fake_node import MIB
from tests.unit.scheduler.fake_agents import Running
from tests.unit.scheduler.world import World


def measured(w: World, model: str, nbytes: int) -> Running:
    """Record `nbytes` as the measured need of a suspended instance, then remove it."""
    running = w.up(model)
    w.can_suspend(running)
    running.suspension = running.suspension.model_copy(update={"need_bytes": nbytes})
    w.sleep(model)
    w.finish_stops()
    running.stopped = True
    running.state = InstanceState.STOPPED
    w.report()
    return running


def hosted(w: World, **more: Any) -> int:
    """Register a vLLM model; return the bytes it is configured to need."""
    w.model("a", engine="vllm", **more)
    return need_of(w.state.models["a"].card).total


def test_next_start_books_the_measured_memory(w: World) -> None:
    w.node(budget=8000 * MIB)
    configured = hosted(w)
    measured(w, "a", configured - 2000 * MIB)
    w.demand("a")
    assert [e.command.reserve_bytes for e in w.starts("a")] == [configured, configured - 2000 * MIB]


def test_measurement_above_the_configured_size_is_booked(w: World) -> None:
    w.node(budget=8000 * MIB)
    configured = hosted(w)
    measured(w, "a", configured + 500 * MIB)
    w.demand("a")
    assert w.starts("a")[-1].command.reserve_bytes == configured + 500 * MIB


def test_booking_is_never_below_weights_plus_kv_cache(w: World) -> None:
    w.node(budget=8000 * MIB)
    hosted(w)
    measured(w, "a", 1 * MIB)
    w.demand("a")
    need = need_of(w.state.models["a"].card)
    assert w.starts("a")[-1].command.reserve_bytes == need.weights + need.kv


def test_new_generation_and_builtin_engine_use_the_computed_size(w: World) -> None:
    w.node(budget=8000 * MIB)
    hosted(w)
    measured(w, "a", 1 * MIB)
    configured = hosted(w, max_concurrency=1)
    w.demand("a")
    assert w.starts("a")[-1].command.reserve_bytes == configured
    w.model("b")
    measured(w, "b", 1 * MIB)
    w.demand("b")
    assert w.starts("b")[-1].command.reserve_bytes == need_of(w.state.models["b"].card).total


def over_two(w: World, need: int) -> Running:
    """Create a suspended instance on two devices, half on each."""
    agent = w.node(budget=400 * MIB)
    agent.devices = ("cpu:0", "cpu:1")
    w.report()
    w.model("a")
    running = w.up("a")
    running.command = running.command.model_copy(update={"device_ids": ("cpu:0", "cpu:1"), "reserve_bytes": need})
    for i in list(w.state.instances):
        del w.state.instances[i]
    for index in (w.state.by_model, w.state.by_node, w.state.by_device):
        index.clear()
    w.can_suspend(running)
    w.sleep("a")
    w.finish_stops()
    assert running.state is InstanceState.SUSPENDED
    return running


def test_each_device_is_booked_for_its_part(w: World) -> None:
    running = over_two(w, 600 * MIB)
    w.demand("a")
    assert running.state is InstanceState.RESUMING, "300 MiB on each of two devices of 400"
    plan = w.state.last_plan_of("a")
    assert plan is not None
    assert plan.chosen is not None
    assert plan.chosen.device_ids == ("cpu:0", "cpu:1")
    assert plan.chosen.needed_bytes == 300 * MIB
    assert [booking_of(w.state, "n1", d).held_bytes for d in ("cpu:0", "cpu:1")] == [300 * MIB, 300 * MIB]


def test_resume_waits_until_all_its_devices_have_room(w: World) -> None:
    running = over_two(w, 600 * MIB)
    w.model("b", pin=True)
    w.demand("b")
    w.get_ready("b")
    w.demand("b", 0)
    (b,) = w.state.of_model("b")
    w.demand("a")
    assert not w.sent(SendResume), f"{b.device_ids} is taken, though the other one is free"
    assert running.state is InstanceState.SUSPENDED


def test_engine_that_has_served_counts_as_measured(w: World) -> None:
    """An engine that has served counts as measured on a node without suspension.

    Before its first request it has not used all the memory that it will.
    """
    w.node(budget=8000 * MIB)
    configured = hosted(w)
    running = w.up("a", served=0)
    running.private = configured - 1000 * MIB
    w.report()
    assert not w.state.measured
    running.completed = 1
    w.report()
    profile = w.state.measured["a"].by_kind["cpu"]
    assert profile.need_bytes == configured - 1000 * MIB
    need = need_of(w.state.models["a"].card)
    assert profile.runtime_bytes == need.runtime - 1000 * MIB
    assert profile.load_bytes == w.state.models["a"].card.info.weights_bytes


def test_measurement_applies_only_to_its_kind_of_device(w: World) -> None:
    w.node(budget=8000 * MIB)
    configured = hosted(w)
    measured(w, "a", configured - 2000 * MIB)
    card = w.state.models["a"].card
    assert start_bytes(w.state, card, "cuda") == configured
    assert start_bytes(w.state, card, "cpu") == start_bytes(w.state, card) == configured - 2000 * MIB


def test_a_changed_model_is_measured_again(w: World) -> None:
    w.node(budget=8000 * MIB)
    configured = hosted(w)
    measured(w, "a", configured - 2000 * MIB)
    w.model("a", engine="vllm", max_model_len=64)
    assert start_bytes(w.state, w.state.models["a"].card) == need_of(w.state.models["a"].card).total


def grow(w: World, running: Running, nbytes: int, *, steps: int = 20) -> None:
    """Let the engine's memory grow to `nbytes` while it serves."""
    first = running.private
    for step in range(1, steps + 1):
        running.private = first + (nbytes - first) * step // steps
        running.completed += 1
        w.report()


def test_a_leak_is_not_booked_for_the_next_start(w: World) -> None:
    """An engine may grow to its normal size, and that is booked; a leak grows on."""
    w.node(budget=64_000 * MIB)
    configured = hosted(w)
    running = w.up("a", served=1)
    running.private = configured
    w.report()
    grow(w, running, int(1.2 * configured))
    card = w.state.models["a"].card
    assert start_bytes(w.state, card) > 1.15 * configured
    grow(w, running, 5 * configured)
    assert configured < start_bytes(w.state, card) <= int(1.25 * configured)


def test_the_first_measurement_bounds_a_leak_above_the_configured_size(w: World) -> None:
    w.node(budget=64_000 * MIB)
    configured = hosted(w)
    running = w.up("a", served=1)
    running.private = 2 * configured
    w.report()
    grow(w, running, 6 * configured)
    assert 2 * configured < start_bytes(w.state, w.state.models["a"].card) <= int(2.5 * configured)


def test_a_model_whose_engine_leaks_stays_placeable_where_it_ran(w: World) -> None:
    w.model("probe", engine="vllm")
    configured = need_of(w.state.models["probe"].card).total
    w.node(budget=configured + 100 * MIB)
    hosted(w)
    running = w.up("a", served=1)
    running.private = 3 * configured
    w.report()
    running.state = InstanceState.STOPPED
    w.report()
    w.demand("a")
    assert [e.command.reserve_bytes for e in w.starts("a")] == [configured, configured + 100 * MIB]
