"""Suspended engines that other models of their template key take."""

from __future__ import annotations

from typing import Any

import pytest

from services.nodeagent.domain import events as e
from services.nodeagent.domain import templates
from services.nodeagent.domain.state import Process
from services.nodeagent.domain.status import instance_status
from shared.contracts.base import ErrorBody
from shared.contracts.engine import EngineReport
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, StartInstance
from shared.errors import EngineFailed
from tests.support.hosted import hosted_card
from tests.unit.nodeagent.world import EPOCH, ERROR, POSSIBLE, World, report, suspend

KEY_ARGS = {"load_format": "thaw"}


def card(name: str, **options: Any) -> ModelCard:
    return hosted_card("/m", "vllm", **{"name": name, "engine_args": KEY_ARGS, **options})


def start(instance_id: str, name: str, template: str | None = None, **more: Any) -> StartInstance:
    command = {"device_ids": ("cpu:0",), "reserve_bytes": 60, "kv_bytes": 1, "card": card(name), **more}
    return StartInstance(token=EPOCH, plan_id="p", instance_id=instance_id, template=template, **command)


def world(limit: int = 4, *devices: str) -> World:
    found = World(*devices, snapshots=500)
    found.state = type(found.state)(**{**found.state.__dict__, "templates": limit})
    return found


def suspended(w: World, instance_id: str, name: str, pid: int = 7, **more: Any) -> None:
    w.receive(e.StartCommand(start(instance_id, name, **more), 1))
    w.receive(e.EngineForked(instance_id, pid, 1))
    w.receive(e.EngineReported(report(instance_id, "ready", pid)), after=5.0)
    w.receive(e.Assessed(instance_id, POSSIBLE, 60))
    w.receive(e.SuspendCommand(suspend(instance_id), 2))
    w.receive(e.PauseAnswered(instance_id, False))
    w.receive(e.Suspended(instance_id, freed_bytes=50, left_bytes=10, used_bytes=60, snapshot_bytes=50))
    assert w[instance_id].state is InstanceState.SUSPENDED


def test_start_takes_the_process_of_its_template() -> None:
    w = world()
    suspended(w, "a", "first")
    effects = w.receive(e.StartCommand(start("b", "second", "a"), 3))
    assert e.Take("b", "a") in effects
    assert not [x for x in effects if isinstance(x, e.Fork | e.Signal)]
    assert e.Reply(3) in effects
    assert (w["a"].state, w["a"].process, w["a"].freed_bytes) == (InstanceState.STOPPED, Process.GONE, 0)
    assert (w["b"].pid, w["b"].process, w["b"].state) == (7, Process.ALIVE, InstanceState.PREPARING)
    assert {k: b.bytes_each for k, b in w.state.ledger.bookings.items()} == {"b": 60}, "no byte is booked twice"
    w.receive(e.EngineReported(report("a", "ready", 7)))
    assert w["a"].state is InstanceState.STOPPED, "a late report of the old instance has no effect"
    w.receive(e.EngineReported(report("b", "loading", 7)))
    w.receive(e.EngineReported(report("b", "ready", 7)))
    assert w["b"].state is InstanceState.READY
    assert instance_status(w.state, w["b"], 0, 0, (), 0.0).template == "a"


def test_instance_that_started_by_a_change_can_be_suspended() -> None:
    w = world()
    suspended(w, "a", "first")
    w.receive(e.StartCommand(start("b", "second", "a"), 3))
    w.receive(e.EngineReported(report("b", "ready", 7)), after=POSSIBLE.resume_s / 2)
    w.receive(e.Assessed("b", POSSIBLE, 60))
    assert instance_status(w.state, w["b"], 0, 0, (), 0.0).suspension.possible, "though a resume takes longer than the change"


def test_booking_of_the_template_makes_room_for_the_start() -> None:
    w = world()
    suspended(w, "a", "first", reserve_bytes=100, card=card("first", memory=100))
    more = {"reserve_bytes": 100, "card": card("second", memory=100)}
    assert e.Take("b", "a") in w.receive(e.StartCommand(start("b", "second", "a", **more), 3)), "100 of 100 bytes"


def test_start_without_room_leaves_its_template_suspended() -> None:
    w = world()
    suspended(w, "a", "first")
    w.receive(e.StartCommand(start("x", "other"), 3))
    effects = w.receive(e.StartCommand(start("b", "second", "a"), 4))
    assert [x.error is not None for x in effects if isinstance(x, e.Reply)] == [True]
    assert w["a"].state is InstanceState.SUSPENDED
    assert set(w.state.ledger.bookings) == {"a", "x"}


def test_queued_start_takes_its_template_once_it_is_granted() -> None:
    w = world()
    suspended(w, "a", "first")
    w.receive(e.StartCommand(start("x", "other", reserve_bytes=80), 3))
    w.receive(e.EngineForked("x", 8, 1))
    w.receive(e.StartCommand(start("b", "second", "a", wait_ms=10_000), 4))
    assert w["b"].process is Process.QUEUED
    w.receive(e.EngineExited("x", 8, -9, ERROR))
    w.receive(e.WeightsReleased("x", 0))
    assert e.Take("b", "a") in w.receive(e.MemoryFreed("x", 80))
    assert set(w.state.ledger.bookings) == {"b"}


@pytest.mark.parametrize(
    "more",
    [
        {"template": "gone"},
        {"card": card("second", max_concurrency=2)},
        {"kv_bytes": 2},
        {"card": card("second", engine_args={})},
    ],
)
def test_start_whose_template_is_gone_or_differs_is_cold(more: dict[str, Any]) -> None:
    w = world()
    suspended(w, "a", "first", reserve_bytes=30)
    effects = w.receive(e.StartCommand(start("b", "second", **{"template": "a", "reserve_bytes": 40, **more}), 3))
    assert e.Fork("b") in effects
    assert w["a"].state is InstanceState.SUSPENDED


def test_template_that_is_not_handed_over_is_killed_and_one_cold_start_follows() -> None:
    w = world()
    suspended(w, "a", "first")
    w.receive(e.StartCommand(start("b", "second", "a"), 3))
    failure = EngineFailed("it cannot be thawed").body()
    assert e.Signal("b", "kill") in w.receive(e.TakeFailed("b", failure))
    effects = w.receive(e.EngineExited("b", 7, -9, ERROR))
    assert e.Fork("b") in effects
    assert (w["b"].process, w["b"].taken_from) == (Process.FORKING, None)
    assert instance_status(w.state, w["b"], 0, 0, (), 0.0).suspension.fell_back == failure
    w.receive(e.EngineForked("b", 9, 1))
    w.receive(e.EngineExited("b", 9, -9, ERROR))
    assert w["b"].state is InstanceState.FAILED, "once"


def test_process_that_exits_during_the_change_is_started_cold_once() -> None:
    w = world()
    suspended(w, "a", "first")
    w.receive(e.StartCommand(start("b", "second", "a"), 3))
    w.receive(e.EngineReported(report("b", "loading", 7)))
    assert e.Fork("b") in w.receive(e.EngineExited("b", 7, -9, ERROR))


def test_restart_by_the_host_shows_in_the_status() -> None:
    w = world()
    suspended(w, "a", "first")
    w.receive(e.StartCommand(start("b", "second", "a"), 3))
    why = ErrorBody(code="engine_failed", message="the probe failed")
    w.receive(e.EngineReported(EngineReport(instance_id="b", pid=7, state="loading", fell_back=why)))
    assert instance_status(w.state, w["b"], 0, 0, (), 0.0).suspension.fell_back == why


def test_latest_suspended_engine_of_each_key_is_offered_up_to_the_limit() -> None:
    w = world(2, "cpu:0", "cpu:1", "cpu:2", "cpu:3")
    cards = [card("a"), card("b"), card("c", max_concurrency=2), card("d", max_concurrency=3)]
    for n, each in enumerate(cards):
        suspended(w, each.name, each.name, pid=n + 7, card=each, device_ids=(f"cpu:{n}",))
    assert set(templates.find_offered(w.state)) == {"c", "d"}
    w.state = type(w.state)(**{**w.state.__dict__, "templates": 3})
    assert set(templates.find_offered(w.state)) == {"b", "c", "d"}, "a and b have one key"
    w.state = type(w.state)(**{**w.state.__dict__, "templates": 0})
    assert templates.find_offered(w.state) == {}
