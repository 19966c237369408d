"""Operators' pulls: cancelled ones, their progress, and those that outlive their leader."""

from __future__ import annotations

from typing import Literal

import pytest

from services.scheduler.domain.busy import is_busy
from services.scheduler.domain.effects import SendCancelPrefetch, SendPrefetch
from services.scheduler.domain.events import PullCancelRequested, PullRequested, Recovered, Tick, WaiterCancelled
from services.scheduler.domain.prewarm.pulls import KEPT_S, LOST_AFTER_S, REPEAT_S, view_pulls
from services.scheduler.domain.state.changes import KINDS, Put, apply, table
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Model, Node
from services.scheduler.domain.state.pulls import REQUESTS_KEPT, Pull
from services.scheduler.domain.state.volatile import LoaderPresence
from services.scheduler.domain.values import replace
from shared.contracts.admin import ModelPulled, PullsCancelled
from shared.contracts.loader import CachedModel, LoaderStatus, PrefetchStatus
from tests.support.fake_node import MIB
from tests.unit.scheduler.prewarm.pull_world import REVISION, commands, error_of, last, loading, pull, report, world
from tests.unit.scheduler.world import World


def cancel(w: World, node: str | None = None, tier: Literal["ssd", "dram"] | None = None, name: str = "m") -> str:
    waiter = w._waiter()
    w.send(PullCancelRequested(w.now, waiter, name, node, tier))
    return waiter


def cancelled(w: World, waiter: str) -> list[tuple[str, str]]:
    answer = w.answer(waiter)
    assert isinstance(answer, PullsCancelled)
    return [(p.node, p.tier) for p in answer.cancelled]


def dropped(w: World) -> list[int | None]:
    """Return the tokens of the commands that were cancelled."""
    assert all(e.command.weights_id == REVISION for e in w.sent(SendCancelPrefetch))
    return [e.command.token for e in w.sent(SendCancelPrefetch)]


def token(w: World, index: int = -1) -> int:
    return w.sent(SendPrefetch)[index].command.token


def request(w: World, request_id: str, name: str = "m") -> str:
    waiter = w._waiter()
    w.send(PullRequested(w.now, waiter, name, request_id=request_id))
    return waiter


def next_leader(w: World, after_s: float = 2.0) -> World:
    """Return the world of the next leader, with what Postgres has: models, nodes and pulls."""
    later = World(now=w.now + after_s, epoch=w.epoch + 1)
    later.state = ClusterState(epoch=later.epoch, recovered_at=later.now, keep_alive_rule=w.policy.profile.keep)
    for kind in (Node, Model, Pull):
        assert kind in KINDS
        apply(later.state, [Put(e) for e in table(w.state, kind).values()])
    later.send(Recovered(later.now))
    later.now += 0.5
    return later


def test_a_cancelled_pull_ends_at_once_for_all_who_wait() -> None:
    w = world()
    report(w)
    first, second = pull(w), pull(w)
    report(w, prefetches=(last(w, "running"),))
    assert cancelled(w, cancel(w)) == [("n1", "ssd")]
    for waiter in (first, second):
        code, text = error_of(w, waiter)
        assert (code, "disk cache of n1 was cancelled" in text) == ("pull_cancelled", True)
    assert dropped(w) == [token(w)]
    assert not view_pulls(w.state, w.now)
    assert not is_busy(w.state, w.now + 3600, w.policy, 1.0)
    assert cancelled(w, cancel(w)) == [], "a repeated cancellation has no effect"
    assert len(dropped(w)) == 1
    report(w)
    w.tick(REPEAT_S + 1)
    report(w)
    assert len(commands(w)) == 1, "it is not sent again"


def test_a_pull_that_waits_for_loads_is_cancelled_before_its_command() -> None:
    w = world()
    report(w, segments=loading("i-1"))
    waiter = pull(w)
    assert cancelled(w, cancel(w, "n1", "ssd")) == [("n1", "ssd")]
    assert error_of(w, waiter)[0] == "pull_cancelled"
    report(w)
    assert (commands(w), dropped(w)) == ([], [])


def test_a_pull_that_has_ended_is_not_cancelled() -> None:
    w = world()
    report(w)
    waiter = pull(w)
    report(w, disk=(REVISION,))
    assert cancelled(w, cancel(w)) == []
    assert isinstance(w.answer(waiter), ModelPulled)
    assert dropped(w) == []


def test_only_the_named_pulls_are_cancelled() -> None:
    w = world("n1", "n2")
    w.model("k", source="s3://b/k")
    report(w, "n1")
    report(w, "n2")
    to_disk, to_memory, elsewhere = pull(w, "n1"), pull(w, "n1", "dram"), pull(w, "n2")
    other = pull(w, "n1", name="k")
    assert cancelled(w, cancel(w, "n1", "dram")) == [("n1", "dram")]
    assert dropped(w) == [token(w, 1)], "the load to the disk continues"
    assert error_of(w, to_memory)[0] == "pull_cancelled"
    assert w.answer(to_disk) is None
    assert sorted(cancelled(w, cancel(w))) == [("n1", "ssd"), ("n2", "ssd")]
    assert error_of(w, elsewhere)[0] == "pull_cancelled"
    assert w.answer(other) is None


def test_unknown_models_and_nodes_are_errors() -> None:
    w = world()
    report(w)
    assert error_of(w, cancel(w, name="x"))[0] == "model_not_found"
    assert error_of(w, cancel(w, "n9"))[0] == "not_found"
    assert w.answer(cancel(w, "n1")) == PullsCancelled(name="m")


def test_a_cancellation_that_was_lost_is_repeated() -> None:
    w = world()
    report(w)
    pull(w)
    running = last(w, "running")
    cancel(w)
    report(w, prefetches=(running,))
    assert len(dropped(w)) == 1, "it may still be on its way"
    w.tick(REPEAT_S + 1)
    report(w, prefetches=(running,))
    assert dropped(w) == [token(w)] * 2
    report(w)
    w.tick(KEPT_S)
    assert not w.state.pulls


def test_a_cancelled_pull_begins_again_when_it_is_asked_for_again() -> None:
    w = world()
    report(w)
    pull(w)
    cancel(w)
    again = pull(w)
    assert len(commands(w)) == 2
    report(w, disk=(REVISION,))
    assert isinstance(w.answer(again), ModelPulled)


def test_the_view_has_the_progress_and_the_reason_of_a_wait() -> None:
    w = world()
    report(w, segments=loading("i-1"))
    pull(w)
    [view] = view_pulls(w.state, w.now)
    assert (view.model, view.node, view.tier, view.since) == ("m", "n1", "ssd", w.now)
    assert (view.state, view.reason) == ("waiting", "n1 loads weights for instances first")
    assert (view.loaded_bytes, view.total_bytes) == (0, w.state.models["m"].card.info.weights_bytes)
    report(w)
    [view] = view_pulls(w.state, w.now)
    assert (view.state, view.reason) == ("waiting", "its command is on the way")
    running = last(w, "running").model_copy(update={"loaded_bytes": 3 * MIB, "total_bytes": 9 * MIB, "bytes_per_second": 5.0})
    report(w, prefetches=(running,))
    [view] = view_pulls(w.state, w.now)
    assert (view.state, view.reason, view.loaded_bytes, view.total_bytes) == ("running", "", 3 * MIB, 9 * MIB)
    assert view.bytes_per_second == 5.0
    w.tick(1.0)
    report(w)
    w.tick(REPEAT_S + 1)
    assert view_pulls(w.state, w.now)[0].reason == "the loader of n1 does not report"


def test_the_next_leader_continues_a_pull_without_a_client() -> None:
    w = world()
    report(w)
    waiter = pull(w)
    w.send(WaiterCancelled(w.now, waiter))
    running = last(w, "running")
    report(w, prefetches=(running,))
    later = next_leader(w)
    assert [p.since for p in view_pulls(later.state, later.now)] == [1000.0]
    report(later, prefetches=(running,))
    later.tick(REPEAT_S + 1)
    report(later, prefetches=(running,))
    assert commands(later) == [], "the loader executes the command of the earlier leader"
    report(later)
    assert commands(later) == [("n1", "m", "ssd")], "the loader was restarted: it lists no command"
    report(later, disk=(REVISION,))
    assert not view_pulls(later.state, later.now)
    later.tick(KEPT_S + 1)
    assert not later.state.pulls


def test_the_next_leader_waits_for_the_report_of_the_loader() -> None:
    w = world()
    report(w)
    pull(w)
    later = next_leader(w, after_s=3600.0)
    stored = LoaderStatus(node="n1", boot_id="", cached=(CachedModel(weights_id=REVISION, tier="ssd", nbytes=1),))
    apply(later.state, [Put(LoaderPresence("n1", later.now - 600.0, stored))])
    later.tick(LOST_AFTER_S - 2)
    assert view_pulls(later.state, later.now), "what is stored of the loader is not its report"
    later.tick(2.0)
    assert not view_pulls(later.state, later.now)
    [ended] = later.state.pulls.values()
    assert getattr(ended.answer, "code", "") == "unavailable"


@pytest.mark.parametrize("state", ["complete", "failed"])
def test_the_next_leader_finds_the_outcome_of_the_command(state: Literal["complete", "failed"]) -> None:
    w = world()
    report(w)
    waiter = request(w, "r1")
    outcome = last(w, state)
    assert w.answer(waiter) is None
    later = next_leader(w)
    report(later, prefetches=(outcome,))
    answer = later.answer(request(later, "r1"))
    assert isinstance(answer, ModelPulled) == (state == "complete")
    assert commands(later) == []


def test_a_message_that_waited_while_the_leader_was_paused_ends_no_pull() -> None:
    """The messages of the loader wait behind it."""
    w = world()
    report(w)
    waiter = pull(w)
    due = Tick(w.now)
    w.now += LOST_AFTER_S + 1
    w.send(WaiterCancelled(w.now, "another"))
    w.send(due)
    assert waiter in w.state.waiters
    report(w, disk=(REVISION,))
    assert isinstance(w.answer(waiter), ModelPulled)


def test_a_pull_ends_with_its_loader() -> None:
    w = world()
    report(w)
    waiter = pull(w)
    w.tick(LOST_AFTER_S + 1)
    assert "was lost while it pulled m" in error_of(w, waiter)[1]


def test_a_repeated_request_gets_the_answer_of_the_pull_that_it_waited_for() -> None:
    w = world()
    report(w)
    request(w, "r1")
    later = next_leader(w)
    report(later, prefetches=(PrefetchStatus(token=token(w), weights_id=REVISION, state="running"),))
    assert cancelled(later, cancel(later)) == [("n1", "ssd")]
    assert error_of(later, request(later, "r1"))[0] == "pull_cancelled", "no second pull begins"
    assert commands(later) == []
    again = next_leader(later)
    assert error_of(again, request(again, "r1"))[0] == "pull_cancelled", "the answer survives, too"
    report(again)
    request(again, "r2")
    assert commands(again) == [("n1", "m", "ssd")], "another request is a new pull"


def test_a_repeated_request_waits_for_the_pull_in_progress() -> None:
    w = world("n1", "n2")
    report(w, "n1")
    report(w, "n2", used=MIB)
    request(w, "r1")
    later = next_leader(w)
    waiter = request(later, "r1")
    assert later.answer(waiter) is None
    report(later, disk=(REVISION,))
    answer = later.answer(waiter)
    assert isinstance(answer, ModelPulled)
    assert answer.node == "n1"


def test_the_requests_of_a_pull_are_bounded() -> None:
    pulled = Pull("m", "n1", "ssd", REVISION, 0.0)
    for number in range(REQUESTS_KEPT + 2):
        pulled = pulled.with_request(f"r{number}")
    assert (len(pulled.requests), pulled.requests[0]) == (REQUESTS_KEPT, "r2")
    assert pulled.with_request("r5") == pulled == pulled.with_request("")


def test_keys_differ_by_model_node_and_tier() -> None:
    one = Pull("m", "n1", "ssd", REVISION, 0.0)
    others = (replace(one, model="a/m"), replace(one, node="n2"), replace(one, tier="dram"))
    assert len({p.key for p in (one, *others)}) == 4
