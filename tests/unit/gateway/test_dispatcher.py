"""Each numbered branch of the dispatcher's decision, with recorded effects."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from services.gateway.domain import failover
from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.fair_queue import flow_of
from services.gateway.domain.route_table import FIRST_BACKOFF_S
from services.gateway.domain.ticket import Ticket
from shared.contracts.demand import MAX_KEYS, OVERCOMMIT, DemandNoted, KeyDemand, LoadFailed
from shared.contracts.node import InstanceState, InstanceStatus
from shared.errors import (
    CheckpointInvalid,
    Conflict,
    EngineFailed,
    InstanceDraining,
    QueueFull,
    QueueTimeout,
    ShuttingDown,
    Unreachable,
)
from tests.unit.gateway.recorded_effects import RecordedEffects, instance, status, ticket


@pytest.fixture
def world() -> RecordedEffects:
    return RecordedEffects()


@pytest.fixture
def dispatcher(world: RecordedEffects) -> Dispatcher:
    return Dispatcher("gw", world)


def ask(dispatcher: Dispatcher, name: str, now: float = 0.0, max_waiting: int = 2, **about: Any) -> Ticket:
    made = replace(ticket(name, now=now), **about)
    dispatcher.on_request(made, max_waiting, now)
    return made


def test_ready_instance_receives_the_request_immediately(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i")), 0)
    ask(dispatcher, "r")
    assert world.sent == [("r", "i")]
    assert world.demands == []


def test_the_least_loaded_instance_is_chosen(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("busy", capacity=4, active=6), instance("free", capacity=4, active=1)), 0)
    ask(dispatcher, "r")
    assert world.sent == [("r", "free")]


def test_no_more_than_twice_the_capacity_is_sent(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i", capacity=2)), 0)
    tickets = [ask(dispatcher, f"r{i}", max_waiting=10) for i in range(6)]
    assert len(world.sent) == 2 * OVERCOMMIT
    dispatcher.on_finished(tickets[0], 1)
    assert world.sent[-1] == ("r4", "i")
    assert dispatcher.count_waiting("m") == 1


def test_demand_is_published_immediately_then_every_second_then_once_as_zero(
    dispatcher: Dispatcher, world: RecordedEffects
) -> None:
    first, second = ask(dispatcher, "a"), ask(dispatcher, "b")
    assert [d.waiting for d in world.demands] == [1]
    for tenth in range(1, 21):
        dispatcher.on_tick(tenth / 10)
    assert [d.waiting for d in world.demands] == [1, 2, 2]
    assert world.demands[-1].oldest_wait_ms == 2000
    dispatcher.on_cancel(first, 2.1)
    dispatcher.on_cancel(second, 2.2)
    assert [d.waiting for d in world.demands] == [1, 2, 2, 0]
    dispatcher.on_tick(9)
    assert len(world.demands) == 4


def test_demand_counts_the_waiting_requests_of_each_key_and_priority(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    for number, (key, weight, priority) in enumerate([("a", 2.0, 0), ("a", 2.0, 0), ("b", 1.0, 0), ("a", 2.0, -5)]):
        ask(dispatcher, f"r{number}", max_waiting=9, key=key, weight=weight, priority=priority)
    dispatcher.on_tick(1.0)
    assert set(world.demands[-1].keys) == {
        KeyDemand(flow=flow_of("a"), weight=2.0, waiting=2),
        KeyDemand(flow=flow_of("b"), waiting=1),
        KeyDemand(flow=flow_of("a"), weight=2.0, priority=-5, waiting=1),
    }
    assert "a" not in {k.flow for k in world.demands[-1].keys}, "the key's name is not sent"


def test_demand_has_the_keys_of_requests_in_flight_until_they_end(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i", capacity=1)), 0)
    sent = [ask(dispatcher, f"s{n}", key="a", weight=2.0, priority=p) for n, p in enumerate((0, -5))]
    sent.append(ask(dispatcher, "waits", key="a", weight=2.0))
    flow = flow_of("a")
    assert set(world.demands[-1].keys) == {
        KeyDemand(flow=flow, weight=2.0, waiting=1, in_flight=1),
        KeyDemand(flow=flow, weight=2.0, priority=-5, in_flight=1),
    }
    for made in sent:
        dispatcher.on_finished(made, 1)
    for n in range(3):
        ask(dispatcher, f"later{n}", key="b")
    assert set(world.demands[-1].keys) == {KeyDemand(flow=flow_of("b"), waiting=1, in_flight=2)}


def test_demand_of_many_keys_has_those_with_the_most_requests(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    for number in range(2 * MAX_KEYS):
        for again in range(3 if number == 7 else 1):
            ask(dispatcher, f"r{number}-{again}", max_waiting=999, key=f"k{number:03}")
    dispatcher.on_tick(1.0)
    keys = world.demands[-1].keys
    assert len(keys) == MAX_KEYS
    assert (keys[0].flow, keys[0].waiting) == (flow_of("k007"), 3)


def test_a_full_queue_refuses_with_a_time_to_retry(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    for name in "ab":
        ask(dispatcher, name)
    dispatcher.on_demand_reply("m", DemandNoted(outlook="starting", eta_ms=7000), 0)
    ask(dispatcher, "c", now=1.0)
    error = world.failed["c"]
    assert isinstance(error, QueueFull)
    assert error.retry_after_ms == 6000
    assert "number 3" in error.message


def test_waiting_requests_are_sent_in_order_when_an_instance_is_ready(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    for name in "ab":
        ask(dispatcher, name)
    dispatcher.on_status(status(instance("i", state=InstanceState.LOADING, capacity=8)), 1)
    assert world.sent == []
    dispatcher.on_status(status(instance("i", capacity=8)), 2)
    assert world.sent == [("a", "i"), ("b", "i")]
    assert world.demands[-1].waiting == 0


def early(name: str) -> InstanceStatus:
    return instance(name, state=InstanceState.LOADING, capacity=8).model_copy(update={"accepts_requests": True})


def test_requests_join_a_load_whose_engine_takes_them(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    ask(dispatcher, "a")
    dispatcher.on_status(status(early("i")), 1)
    ask(dispatcher, "b", now=2.0)
    assert world.sent == [("a", "i"), ("b", "i")]
    route = dispatcher.routes.get("i")
    assert route is not None
    assert route.ready_since == 1
    dispatcher.on_status(status(instance("i", capacity=8)), 3)
    assert route.ready_since == 3


def test_no_request_joins_a_load_while_an_instance_is_ready(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(early("a"), instance("b")), 0)
    for name in ("1", "2", "3"):
        ask(dispatcher, name)
    assert world.sent == [("1", "b"), ("2", "b")]


def test_new_request_does_not_overtake_waiting_requests(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i")), 0)
    running = [ask(dispatcher, f"r{i}", max_waiting=10) for i in range(3)]
    ask(dispatcher, "late", max_waiting=10)
    dispatcher.on_finished(running[0], 1)
    assert [name for name, _ in world.sent] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("error", [InstanceDraining(), Unreachable()])
def test_refused_request_returns_to_the_head_of_the_queue(
    dispatcher: Dispatcher, world: RecordedEffects, error: InstanceDraining | Unreachable
) -> None:
    dispatcher.on_status(status(instance("i", capacity=1)), 0)
    refused = ask(dispatcher, "first")
    ask(dispatcher, "second")
    third = ask(dispatcher, "third")
    assert dispatcher.count_waiting("m") == 1
    dispatcher.on_refused(refused, error, 0.1)
    assert world.failed == {}
    dispatcher.on_status(status(instance("i", capacity=1), instance("j", capacity=1)), 0.2)
    assert world.sent[2:] == [("first", "j"), ("third", "j")]
    assert third.attempts == 1


def test_refusing_instance_gets_a_growing_backoff(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i")), 0)
    refused = ask(dispatcher, "r")
    now, gaps = 0.0, []
    for _ in range(4):
        dispatcher.on_refused(refused, Unreachable(), now)
        before = now
        while refused.instance_id is None:
            now += 0.05
            dispatcher.on_tick(now)
            dispatcher.on_status(status(instance("i")), now)
        gaps.append(now - before)
    assert gaps == sorted(gaps)
    assert gaps[-1] > 4 * gaps[0]


def test_request_fails_after_the_maximum_number_of_refusals(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i")), 0)
    made = ticket("r", wait=1e6)
    dispatcher.on_request(made, 1, 0)
    now = 0.0
    while not world.failed:
        dispatcher.on_refused(made, Unreachable(), now)
        now += 5
        dispatcher.on_status(status(instance("i")), now)
    assert isinstance(world.failed["r"], EngineFailed)
    assert len(world.sent) == failover.MAX_ATTEMPTS


@pytest.mark.parametrize("admitted", [True, False])
def test_a_dead_engines_request_is_sent_on_within_bounds(dispatcher: Dispatcher, world: RecordedEffects, admitted: bool) -> None:
    names = [f"i{n}" for n in range((failover.MAX_ENGINE_DEATHS if admitted else failover.MAX_LOSSES_BEFORE_ADMISSION + 1) + 1)]
    dispatcher.on_status(status(instance(names[0])), 0)
    made = ask(dispatcher, "r")
    for now, (dead, alive) in enumerate(itertools.pairwise(names), 1):
        made.is_admitted = admitted
        dispatcher.on_status(status(instance(dead, state=InstanceState.FAILED), instance(alive)), now)
        dispatcher.on_tick(now + 0.1)
    assert world.sent == [("r", name) for name in names[:-1]]
    assert isinstance(world.failed["r"], EngineFailed)


def test_requests_of_a_failed_engine_keep_their_order(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i", capacity=4)), 0)
    for n in range(4):
        dispatcher.on_request(ticket(f"r{n}", now=n / 10), 8, n / 10)
    dispatcher.on_status(status(instance("i", state=InstanceState.FAILED)), 1)
    dispatcher.on_tick(1.1)
    dispatcher.on_status(status(instance("j", capacity=4)), 2)
    assert [name for name, _ in world.sent] == ["r0", "r1", "r2", "r3"] * 2


def test_output_resets_the_limits_of_losses(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    made, now = ticket("r", wait=1e6), 0.0
    dispatcher.on_status(status(instance("i")), now)
    dispatcher.on_request(made, 1, now)
    while not world.failed:
        now += 10
        made.is_resumable = True
        dispatcher.on_status(status(instance("i")), now)
        dispatcher.on_progress(made, now)
        dispatcher.on_engine_lost(made, EngineFailed("it ended"), now)
    assert len(world.sent) == failover.MAX_LOSSES + 1


def test_missing_request_is_resent_after_the_instance_denies_having_it(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    """An instance that is silent about a request is asked, and its reply decides.

    It serves other requests meanwhile, so it is never idle.
    """
    dispatcher.on_status(status(instance("i", capacity=4, active=2)), 0)
    made = ask(dispatcher, "r")
    dispatcher.on_message(made, 1)
    made.is_resumable = True
    for now in (5.0, 10.9):
        dispatcher.on_tick(now)
    assert world.probed == []
    for now in (11.0, 11.1, 20.9):  # the engine has the request: no effect, and it is asked again later
        dispatcher.on_status(status(instance("i", capacity=4, active=2)), now)
        dispatcher.on_tick(now)
    assert world.probed == ["r"]
    dispatcher.on_tick(21.0)
    assert world.probed == ["r", "r"]
    dispatcher.on_missing(made, "another attempt", 21.0)
    dispatcher.on_missing(made, made.attempt_id, 21.0)
    dispatcher.on_tick(21.1)
    assert len(world.sent) == 1, "its last words may still be under way"
    dispatcher.on_tick(21.0 + failover.GONE_GRACE_S)
    assert world.sent == [("r", "i"), ("r", "i")]
    assert world.cancelled == ["r"], "in case the request arrives there late"


def test_silent_request_is_probed_soon_after_a_reconnection(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    """A restart of NATS may have lost the last messages, which no later message shows."""
    dispatcher.on_status(status(instance("i", capacity=4, active=2)), 0)
    silent, alive = ask(dispatcher, "silent"), ask(dispatcher, "alive")
    for made in (silent, alive):
        dispatcher.on_message(made, 1)
    dispatcher.on_reconnected(2.0)
    dispatcher.on_tick(2.9)
    assert world.probed == []
    dispatcher.on_message(alive, 2.95)
    for now in (3.0, 3.1, 12.9):
        dispatcher.on_tick(now)
    assert world.probed == ["silent"]
    dispatcher.on_tick(13.0)
    assert sorted(world.probed) == ["alive", "silent", "silent"], "from now on after PROBE_AFTER_S"


def test_probe_that_finds_no_engine_is_repeated_soon(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i", capacity=4, active=2)), 0)
    made = ask(dispatcher, "r")
    dispatcher.on_message(made, 1)
    dispatcher.on_reconnected(2.0)
    dispatcher.on_tick(3.0)
    dispatcher.on_unprobed(made, "another attempt", 3.05)
    dispatcher.on_tick(4.1)
    assert world.probed == ["r"]
    dispatcher.on_unprobed(made, made.attempt_id, 4.2)
    for now in (5.1, 5.3, 6.4):
        dispatcher.on_tick(now)
    assert world.probed == ["r", "r"]


def test_late_final_messages_are_accepted(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i", capacity=4, active=2)), 0)
    made = ask(dispatcher, "r")
    dispatcher.on_missing(made, made.attempt_id, 21.0)
    dispatcher.on_message(made, 21.1)
    dispatcher.on_tick(22)
    assert len(world.sent) == 1


def test_time_at_a_lost_instance_is_no_time_in_the_queue(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    """A response that is sent as a whole takes longer than a request may wait for an instance."""
    dispatcher.on_status(status(instance("i")), 0)
    ask(dispatcher, "r", now=0.0)  # waits for 10 s at most
    dispatcher.on_status(status(instance("i", active=1)), 24.0)
    dispatcher.on_status(status(instance("i", state=InstanceState.FAILED)), 25.0)
    dispatcher.on_tick(25.0)
    dispatcher.on_tick(34.9)
    assert dispatcher.count_waiting("m") == 1
    assert world.failed == {}
    dispatcher.on_tick(35.0)
    assert isinstance(world.failed["r"], QueueTimeout)


def test_response_timeout_covers_all_resumed_attempts(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    made = ticket("r", wait=1e6, response=100)
    dispatcher.on_status(status(instance("i", active=1)), 0)
    dispatcher.on_request(made, 1, 0)
    made.is_resumable = True
    dispatcher.on_engine_lost(made, EngineFailed("it ended"), 60)
    dispatcher.on_status(status(instance("i", active=1)), 90)  # the engine is not the cause of the wait
    assert (made.elapsed_s, made.sent_at) == (60, 90)
    dispatcher.on_message(made, 129)
    dispatcher.on_tick(129)
    assert not world.failed
    dispatcher.on_tick(131)
    assert world.failed["r"].status == 504


def test_response_that_one_instance_cannot_resume_is_sent_to_another(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    made = ticket("r", wait=1e6)
    dispatcher.on_status(status(instance("i"), instance("j")), 0)
    dispatcher.on_request(made, 1, 0)
    made.is_resumable, made.revision = True, "0"
    dispatcher.on_refused(made, Conflict("other weights", param="resume"), 1)
    assert world.sent == [("r", "i"), ("r", "j")]
    assert dispatcher.routes.get("i") is dispatcher.routes.choose("m", 1)  # the engine serves other requests
    dispatcher.on_refused(made, Conflict("other weights", param="resume"), 2)
    assert world.failed["r"].message == "other weights"


def test_yielded_request_is_sent_to_its_destination_or_back_to_its_source(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    made = ticket("r", wait=1e6)
    dispatcher.on_status(status(instance("i", capacity=4), instance("j"), instance("k", active=1)), 0)
    dispatcher.on_request(made, 1, 0)
    made.is_resumable = True
    dispatcher.on_yielded(made, "k", 1)
    dispatcher.on_refused(made, InstanceDraining(), 2)
    dispatcher.on_yielded(made, "gone", 3)
    assert [where for _, where in world.sent] == ["i", "k", "i", "i"]


def test_committed_request_fails_with_its_engine(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i")), 0)
    made = ask(dispatcher, "r")
    dispatcher.on_message(made, 0.5)
    made.is_committed = True
    dispatcher.on_status(status(instance("i", state=InstanceState.FAILED)), 1)
    dispatcher.on_tick(1)
    assert isinstance(world.failed["r"], EngineFailed)


def test_restarted_nodeagent_has_time_to_adopt_its_engines(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i")), 0)
    made = ask(dispatcher, "r")
    dispatcher.on_status(status(boot="new"), 1)
    dispatcher.on_tick(1)
    dispatcher.on_message(made, 2)
    dispatcher.on_tick(4)
    assert not world.failed
    dispatcher.on_status(status(instance("i", active=1), boot="new"), 4)
    dispatcher.on_tick(8)
    assert not world.failed
    assert len(world.sent) == 1


def test_silent_node_receives_no_new_requests_and_loses_none(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i", active=1)), 0)
    ask(dispatcher, "r")
    dispatcher.on_tick(6)
    ask(dispatcher, "s", now=6)
    assert world.sent == [("r", "i")]
    assert not world.failed
    dispatcher.on_status(status(instance("i", capacity=1, active=1)), 7)
    assert [name for name, _ in world.sent] == ["r", "s"]


def test_request_is_lost_if_its_engine_reports_idle(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i")), 0)
    made = ask(dispatcher, "r")
    made.is_committed = True
    for now in range(1, 12):
        dispatcher.on_status(status(instance("i")), now)
        dispatcher.on_tick(now)
    assert isinstance(world.failed["r"], EngineFailed)


def test_waiting_requests_time_out(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    ask(dispatcher, "r")
    dispatcher.on_tick(9.9)
    assert not world.failed
    dispatcher.on_tick(10)
    assert isinstance(world.failed["r"], QueueTimeout)
    assert world.failed["r"].should_retry is False
    assert world.demands[-1].waiting == 0


def test_failed_load_fails_the_requests_waiting_for_that_model(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    ask(dispatcher, "r")
    dispatcher.on_request(ticket("other", model="o"), 2, 0)
    dispatcher.on_load_failed(LoadFailed(model="m", error=CheckpointInvalid("torn").body()), 1)
    assert isinstance(world.failed["r"], CheckpointInvalid)
    assert "other" not in world.failed


def test_failed_load_of_a_further_instance_fails_no_request(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    """The requests that wait are served by the instance that is ready."""
    dispatcher.on_status(status(instance("i", capacity=1)), 0)
    sent = [ask(dispatcher, f"s{n}", max_waiting=9) for n in range(OVERCOMMIT)]
    ask(dispatcher, "waits", max_waiting=9)
    dispatcher.on_load_failed(LoadFailed(model="m", error=CheckpointInvalid("torn").body()), 1)
    assert world.failed == {}
    dispatcher.on_finished(sent[0], 2)
    assert world.sent[-1] == ("waits", "i")
    dispatcher.on_status(status(instance("i", state=InstanceState.FAILED)), 3)
    ask(dispatcher, "later", now=3)
    dispatcher.on_load_failed(LoadFailed(model="m", error=CheckpointInvalid("torn").body()), 4)
    assert isinstance(world.failed["later"], CheckpointInvalid)


def test_requests_that_are_refused_together_back_off_once(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    """As after a restart of NATS, when the gateway has reconnected before the engine."""
    dispatcher.on_status(status(instance("i", capacity=4)), 0)
    tickets = [ask(dispatcher, name, max_waiting=9) for name in "abcd"]
    for made in tickets:
        dispatcher.on_refused(made, Unreachable("No engine listens"), 1.0)
    dispatcher.on_tick(1.0 + 0.9 * FIRST_BACKOFF_S)
    assert len(world.sent) == len(tickets)
    dispatcher.on_tick(1.0 + FIRST_BACKOFF_S)
    assert len(world.sent) == 2 * len(tickets)


def test_running_request_fails_at_its_deadline(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i")), 0)
    made = ask(dispatcher, "r")
    dispatcher.on_message(made, 99)
    dispatcher.on_status(status(instance("i", active=1)), 99.9)
    dispatcher.on_tick(100)
    assert world.failed["r"].status == 504
    assert world.cancelled == ["r"]


def test_closing_dispatcher_refuses_new_requests_and_keeps_queued_ones(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    ask(dispatcher, "old")
    dispatcher.on_closing()
    ask(dispatcher, "new")
    assert isinstance(world.failed["new"], ShuttingDown)
    dispatcher.on_status(status(instance("i")), 1)
    assert world.sent == [("old", "i")]


def test_an_overtaken_status_is_dropped(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    old = status(instance("i"))
    dispatcher.on_status(status(instance("i", state=InstanceState.STOPPED)), 0)
    dispatcher.on_status(old, 0)
    ask(dispatcher, "r")
    assert world.sent == []
