"""Operators' pulls: where they go, when they are repeated, and how they end."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.domain.busy import is_busy
from services.scheduler.domain.effects import SendCancelPrefetch
from services.scheduler.domain.events import WaiterCancelled
from services.scheduler.domain.prewarm.pulls import LOST_AFTER_S, REPEAT_S, view_pulls
from shared.contracts.admin import ModelPulled
from shared.contracts.loader import SegmentStatus
from shared.errors import CheckpointInvalid
from tests.support.fake_node import MIB
from tests.unit.scheduler.prewarm.pull_world import REVISION, ROOM, commands, error_of, last, loading, pull, report, world


def test_a_pull_without_any_demand_is_answered_when_it_is_on_the_disk() -> None:
    w = world()
    report(w)
    first = pull(w)
    assert commands(w) == [("n1", "m", "ssd")]
    assert w.answer(first) is None
    assert is_busy(w.state, w.now + 3600, w.policy, 1.0)
    second = pull(w, "n1")
    w.tick(4.0)
    report(w, prefetches=(last(w, "running"),))
    for _ in range(250):
        w.tick(4.0)
        report(w, prefetches=(last(w, "running"),))
    assert len(commands(w)) == 1, "it runs: it is neither repeated nor cancelled"
    report(w, disk=(REVISION,), memory=(REVISION,))
    answer = w.answer(first)
    assert isinstance(answer, ModelPulled)
    assert (answer.node, answer.tier, answer.tiers, answer.was_there) == ("n1", "ssd", ("ssd", "dram"), False)
    assert answer.nbytes == w.state.models["m"].card.info.weights_bytes
    assert answer.took_ms == pytest.approx(1004e3)
    assert w.answer(second) == answer
    assert not view_pulls(w.state, w.now)
    assert not w.state.waiters
    assert not w.state.instances


def test_a_pull_of_weights_that_are_there_is_answered_at_once() -> None:
    w = world("n1", "n2")
    report(w, "n1")
    report(w, "n2", disk=(REVISION,), used=ROOM, ssd=1)
    answer = w.answer(pull(w))
    assert isinstance(answer, ModelPulled)
    assert (answer.node, answer.was_there, answer.took_ms) == ("n2", True, 0.0)
    assert commands(w) == []


def test_the_node_is_the_nearest_and_then_the_one_with_most_room() -> None:
    w = world("n1", "n2", "n3", "n4")
    report(w, "n1", used=500 * MIB)
    report(w, "n2", used=200 * MIB)
    report(w, "n3", queue_ms=900.0)
    report(w, "n4", disk=(REVISION,), used=900 * MIB)
    pull(w, tier="dram")
    w.change_node("n4", "cordon")
    w.model("k", source="s3://b/k")
    pull(w, name="k")
    assert commands(w) == [("n4", "m", "dram"), ("n2", "k", "ssd")]


def test_a_preempted_pull_is_repeated_after_the_load_that_preempted_it() -> None:
    w = world()
    report(w)
    waiter = pull(w)
    report(w, prefetches=(last(w, "preempted"),), segments=loading("i-1"))
    w.tick(20.0)
    report(w, prefetches=(last(w, "preempted"),), segments=loading("i-1"))
    assert len(commands(w)) == 1
    report(w, prefetches=(last(w, "preempted"),), segments=loading("i-1", loaded=9))
    assert len(commands(w)) == 2
    report(w, prefetches=(last(w, "complete"),))
    assert isinstance(w.answer(waiter), ModelPulled)


def test_a_command_that_the_loader_does_not_know_is_repeated() -> None:
    w = world()
    report(w)
    pull(w)
    w.tick(REPEAT_S / 2)
    report(w)
    assert len(commands(w)) == 1, "it may still be on its way"
    w.tick(REPEAT_S)
    report(w)
    assert len(commands(w)) == 2


def test_a_pull_waits_for_loads_in_progress_but_not_for_prefetches() -> None:
    w = world()
    report(w, segments=loading("i-1"))
    pull(w)
    assert commands(w) == []
    report(w, segments=loading("prefetch:1"))
    assert commands(w) == [("n1", "m", "ssd")]


def test_a_pull_ends_with_the_error_of_its_prefetch() -> None:
    w = world()
    report(w)
    waiter = pull(w)
    report(w, prefetches=(last(w, "failed", CheckpointInvalid("shard 3 is damaged").body()),))
    assert error_of(w, waiter) == ("checkpoint_invalid", "shard 3 is damaged")
    assert not view_pulls(w.state, w.now)


def test_weights_that_do_not_stay_in_memory_are_an_error() -> None:
    w = world()
    report(w)
    waiter = pull(w, tier="dram")
    held = (SegmentStatus(weights_id=REVISION, model="m", segment="s", total_bytes=9, loaded_bytes=9, holders=("prefetch:1",)),)
    report(w, segments=held, prefetches=(last(w, "running"),))
    assert w.answer(waiter) is None
    report(w, prefetches=(last(w, "complete"),))
    assert error_of(w, waiter)[0] == "insufficient_memory"


def test_a_pull_continues_without_its_requester_and_ends_with_its_model() -> None:
    w = world()
    report(w)
    waiter = pull(w)
    w.send(WaiterCancelled(w.now, waiter))
    w.tick(1.0)
    assert view_pulls(w.state, w.now)
    joined = pull(w)
    assert len(commands(w)) == 1
    w.remove("m")
    assert error_of(w, joined)[0] == "conflict"
    assert [(e.node, e.command.weights_id) for e in w.sent(SendCancelPrefetch)] == [("n1", REVISION)]


def test_a_pull_whose_loader_is_lost_ends_with_an_error() -> None:
    w = world()
    report(w)
    waiter = pull(w)
    w.tick(LOST_AFTER_S - 1)
    assert w.answer(waiter) is None, "a loader may be restarted"
    w.tick(2.0)
    assert error_of(w, waiter)[0] == "unavailable"


@pytest.mark.parametrize(
    ("spec", "request_", "code", "text"),
    [
        ({}, {"name": "x"}, "model_not_found", "thaw models list"),
        ({}, {"node": "n9"}, "not_found", "thaw node list"),
        ({"engine": "llamacpp", "source": "hf://b/m"}, {}, "invalid_request", "thaw wake m"),
        ({"source": "/m/m"}, {}, "invalid_request", "--to dram"),
    ],
)
def test_bad_input_is_refused(spec: dict[str, Any], request_: dict[str, Any], code: str, text: str) -> None:
    w = world(**spec)
    report(w)
    found = error_of(w, pull(w, **request_))
    assert found[0] == code
    assert text in found[1]
    assert not w.state.pulls
    assert not w.state.waiters


def test_a_local_directory_is_loaded_into_memory() -> None:
    w = world(source="/m/m")
    report(w)
    pull(w, tier="dram")
    assert commands(w) == [("n1", "m", "dram")]


def test_no_room_is_an_error_with_the_setting_to_change() -> None:
    w = world("n1", "n2")
    report(w, "n1", ssd=1, dram=1)
    for node in ("n1", None):
        code, text = error_of(w, pull(w, node))
        assert (code, "THAW_CACHE_BYTES" in text) == ("store_full", True)
    code, text = error_of(w, pull(w, "n1", "dram"))
    assert (code, "THAW_DRAM_BYTES" in text) == ("insufficient_memory", True)
    assert "does not report" in error_of(w, pull(w, "n2"))[1]
    w.change_node("n1", "cordon")
    report(w, "n1")
    assert "cordoned" in error_of(w, pull(w))[1]
    pull(w, "n1")
    assert commands(w) == [("n1", "m", "ssd")], "an operator may fill a cordoned node"
