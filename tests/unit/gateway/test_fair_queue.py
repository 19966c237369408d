"""Fair shares of keys in the queue of one model."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.domain.caller import ANONYMOUS, Caller
from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.fair_queue import VirtualClock, choose_dropped, flow_of, is_below_share
from services.gateway.domain.model_queue import ModelQueue
from services.gateway.domain.ticket import Stage, Ticket
from shared.contracts.keys import ApiKey
from shared.contracts.node import InstanceState
from shared.errors import InstanceDraining, QueueFull
from tests.support.examples import examples
from tests.unit.gateway.recorded_effects import RecordedEffects, instance, status, ticket


def _of(key: str, name: str, now: float = 0.0, cost: float = 1.0, priority: int = 0) -> Ticket:
    made = ticket(name, now=now)
    made.key, made.cost, made.priority = key, cost, priority
    return made


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), min_size=30, max_size=120),
    st.integers(5, 100),
)
def test_backlogged_keys_get_equal_cost_up_to_one_request_each(requests: list[tuple[str, int]], served: int) -> None:
    """The bound of start-time fair queueing (Goyal et al., theorem 1) while keys are backlogged."""
    clock = VirtualClock()
    waiting = sorted((clock.tag(key, float(cost)), i, key, cost) for i, (key, cost) in enumerate(requests))
    left = Counter(key for key, _ in requests)
    largest: dict[str, int] = defaultdict(int)
    for key, cost in requests:
        largest[key] = max(largest[key], cost)
    received = dict.fromkeys(left, 0)
    for tag, _, key, cost in waiting[:served]:
        clock.advance(tag)
        received[key] += cost
        left[key] -= 1
        if not all(left.values()):
            break  # a key is no longer backlogged
        for one in received:
            for other in received:
                assert received[one] - received[other] <= largest[one] + largest[other]


def test_a_key_that_was_idle_has_no_credit_and_no_debt() -> None:
    clock = VirtualClock()
    tags = [clock.tag("a", 1.0) for _ in range(10)]
    for tag in tags[:5]:
        clock.advance(tag)
    assert clock.tag("b", 1.0) == clock.time == 4.0
    assert clock.tag("b", 1.0) == 5.0


def test_the_longest_queue_gives_way() -> None:
    assert choose_dropped({"a": 5}, "b") == "a"
    assert choose_dropped({"a": 5, "b": 4}, "b") == "b"
    assert choose_dropped({"a": 5}, "a") == "a"
    assert choose_dropped({"a": 3, "b": 9}, "a") == "b"
    assert choose_dropped({"a": 1}, "b") == "b"


def test_a_flood_of_one_key_delays_another_by_at_most_one_request() -> None:
    world = RecordedEffects()
    dispatcher = Dispatcher("gw", world)
    for i in range(20):
        dispatcher.on_request(_of("flood", f"f{i}"), 100, 0.0)
    for i in range(3):
        dispatcher.on_request(_of("other", f"o{i}", now=1.0), 100, 1.0)
    dispatcher.on_status(status(instance("i", capacity=100)), 2)
    order = [name for name, _ in world.sent]
    assert [order.index(f"o{i}") for i in range(3)] == [1, 3, 5]
    assert [name for name in order if name.startswith("f")] == [f"f{i}" for i in range(20)]


def test_the_key_that_floods_a_full_queue_is_refused_itself() -> None:
    world = RecordedEffects()
    dispatcher = Dispatcher("gw", world)
    floods = [_of("flood", f"f{i}") for i in range(10)]
    for flood in floods:
        dispatcher.on_request(flood, 8, 0.0)
    assert sorted(world.failed) == ["f8", "f9"]
    for i in range(6):
        dispatcher.on_request(_of("other", f"o{i}", now=1.0), 8, 1.0)
    assert sorted(world.failed) == ["f4", "f5", "f6", "f7", "f8", "f9", "o4", "o5"]
    assert all(isinstance(error, QueueFull) for error in world.failed.values())
    assert dispatcher.count_waiting("m") == 8
    assert floods[4].stage is Stage.DONE


def test_a_key_alone_gets_the_whole_queue() -> None:
    world = RecordedEffects()
    dispatcher = Dispatcher("gw", world)
    for i in range(8):
        dispatcher.on_request(_of("only", f"r{i}"), 8, 0.0)
    assert world.failed == {}
    dispatcher.on_status(status(instance("i", capacity=8)), 1)
    assert [name for name, _ in world.sent] == [f"r{i}" for i in range(8)]


def test_large_requests_take_their_share_in_tokens() -> None:
    world = RecordedEffects()
    dispatcher = Dispatcher("gw", world)
    for i in range(4):
        dispatcher.on_request(_of("large", f"l{i}", cost=100.0), 100, 0.0)
    for i in range(40):
        dispatcher.on_request(_of("small", f"s{i}", now=1.0, cost=10.0), 100, 1.0)
    dispatcher.on_status(status(instance("i", capacity=100)), 2)
    order = [name for name, _ in world.sent]
    assert [sum(name[0] == "s" for name in order[: order.index(f"l{i}")]) for i in range(1, 4)] == [10, 20, 30]


def test_a_request_that_lost_its_instance_is_before_those_that_wait() -> None:
    world = RecordedEffects()
    dispatcher = Dispatcher("gw", world)
    dispatcher.on_status(status(instance("i", capacity=1)), 0)
    first = [_of("a", f"a{i}") for i in range(4)]
    for each in first:
        dispatcher.on_request(each, 100, 0.0)
    dispatcher.on_request(_of("b", "b0", now=0.5), 100, 0.5)
    dispatcher.on_status(status(instance("i", capacity=1, state=InstanceState.DRAINING)), 1)
    dispatcher.on_refused(first[0], InstanceDraining(), 1.0)
    dispatcher.on_status(status(instance("j", capacity=8)), 2)
    assert next(name for name, to in world.sent if to == "j") == "a0"


def test_a_key_gets_a_share_in_proportion_to_its_weight() -> None:
    world = RecordedEffects()
    dispatcher = Dispatcher("gw", world)
    for i in range(40):
        dispatcher.on_request(_of("heavy", f"h{i}", cost=10.0 / 3), 100, 0.0)
        dispatcher.on_request(_of("light", f"l{i}", cost=10.0), 100, 0.0)
    dispatcher.on_status(status(instance("i", capacity=100)), 2)
    first = [name[0] for name, _ in world.sent[:40]]
    assert abs(first.count("h") - 30) <= 1


def test_higher_priorities_are_served_first_and_shares_hold_inside_each() -> None:
    world = RecordedEffects()
    dispatcher = Dispatcher("gw", world)
    for priority in (0, 5, -5):
        for i in range(4):
            dispatcher.on_request(_of("a", f"a{priority}.{i}", priority=priority), 100, 0.0)
        for i in range(2):
            dispatcher.on_request(_of("b", f"b{priority}.{i}", now=1.0, priority=priority), 100, 1.0)
    dispatcher.on_status(status(instance("i", capacity=100)), 2)
    keys = "abab" + "aa"
    assert [(name[0], int(name[1:].split(".")[0])) for name, _ in world.sent] == [(k, p) for p in (5, 0, -5) for k in keys]


def test_a_full_queue_drops_the_lowest_priority_and_never_a_higher_one() -> None:
    world = RecordedEffects()
    dispatcher = Dispatcher("gw", world)
    for i in range(2):
        dispatcher.on_request(_of("high", f"h{i}", priority=1), 4, 0.0)
    for i in range(2):
        dispatcher.on_request(_of("low", f"l{i}"), 4, 0.0)
    dispatcher.on_request(_of("lower", "x", priority=-1), 4, 0.0)
    assert list(world.failed) == ["x"]
    for i in range(3):
        dispatcher.on_request(_of("other", f"o{i}", priority=1), 4, 0.0)
    assert list(world.failed) == ["x", "l1", "l0", "o2"]


def test_a_request_asks_for_at_most_the_priority_of_its_key() -> None:
    def caller(priority: int | None) -> Caller:
        return Caller("k", "inference", key=ApiKey(name="k", created=0, priority=priority))

    assert [caller(None).priority(asked) for asked in (None, 7, -7)] == [0, 0, -7]
    assert [caller(5).priority(asked) for asked in (None, 7, 3, -7)] == [0, 5, 3, -7]
    assert [caller(-5).priority(asked) for asked in (None, 7, -7)] == [-5, -5, -7]
    assert ANONYMOUS.priority(9) == 0


def test_a_key_below_its_share_does_not_wait_for_the_requests_of_a_flood() -> None:
    world = RecordedEffects()
    dispatcher = Dispatcher("gw", world)
    dispatcher.on_status(status(instance("i", capacity=4)), 0)
    for i in range(20):
        dispatcher.on_request(_of("flood", f"f{i}"), 100, 0.0)
    assert len(world.sent) == 8
    for i in range(6):
        dispatcher.on_request(_of("other", f"o{i}", now=1.0), 100, 1.0)
    assert [name for name, _ in world.sent[8:]] == ["o0", "o1", "o2", "o3"]
    assert dispatcher.count_waiting("m") == 14
    for i in range(20, 30):
        dispatcher.on_request(_of(f"third{i}", f"t{i}", now=2.0), 100, 2.0)
    assert len(world.sent) == 16, "an instance has at most four times its capacity"


def test_shares_of_instances_are_in_proportion_to_weights() -> None:
    in_flight, weights = {"a": 3, "b": 2}, {"a": 3.0, "b": 1.0, "c": 1.0}
    assert is_below_share("a", in_flight, weights, 8)
    assert not is_below_share("b", in_flight, weights, 8)
    assert is_below_share("c", in_flight, weights, 1)


def test_demand_is_not_published_for_a_request_that_does_not_wait() -> None:
    world = RecordedEffects()
    dispatcher = Dispatcher("gw", world)
    dispatcher.on_status(status(instance("i", capacity=1)), 0)
    for i in range(2):
        dispatcher.on_request(_of("a", f"a{i}"), 100, 0.0)
    dispatcher.on_request(_of("b", "b0"), 100, 0.0)
    assert [name for name, _ in world.sent] == ["a0", "a1", "b0"]
    assert world.demands == []


def test_engines_know_a_key_by_an_opaque_id_that_all_gateways_agree_on() -> None:
    assert flow_of("") == ""
    assert flow_of("team-a") == "1451bf93600a9018"
    assert "team" not in flow_of("team-a")
    assert flow_of("team-a") != flow_of("team-b")


def test_a_request_that_had_an_instance_keeps_no_other_from_giving_way() -> None:
    queue = ModelQueue()
    for name, key, attempts in (("a1", "a", 1), ("a2", "a", 1), ("b1", "b", 0), ("b2", "b", 0)):
        waiting = ticket(name)
        waiting.key, waiting.priority, waiting.attempts = key, -1, attempts
        queue.insert(waiting)
    dropped = [queue.find_dropped(ticket("new")) for _ in range(2)]
    assert [found.id if found is not None else None for found in dropped] == ["b2", "b2"]
    for name in ("b1", "b2"):
        queue.serve(queue.waiting[name])
    assert queue.find_dropped(ticket("new")) is None
