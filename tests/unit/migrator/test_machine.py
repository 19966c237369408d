"""One migration, step by step."""

from __future__ import annotations

import pytest

from services.migrator.domain.decide import SLOW_S
from services.migrator.domain.events import Ask
from services.migrator.domain.work import Options
from shared.contracts.base import Message
from shared.contracts.migration import LEASE_S, ListRequests, MoveRequest, PrepareResume, ReadTokens
from shared.errors import PayloadTooLarge
from tests.unit.migrator.world import PROMPT, Engine, Letter, World


def until(world: World, kind: type) -> Letter:
    """Advance the world until such a request is in progress."""
    for _ in range(500):
        for letter in world.letters:
            if isinstance(letter.ask.message, kind):
                return letter
        world.step()
    raise AssertionError(f"no {kind}")


def leave_unanswered(world: World, kind: type) -> None:
    """Let the deadline of the next such request pass."""
    letter = until(world, kind)
    world.pass_time(letter.ask.message.deadline_ms / 1e3)
    world.lose(letter, done=False)


def test_a_request_moves_in_shrinking_rounds() -> None:
    world = World()
    request, other = world.request(), world.request()
    record = world.migrate(request)
    assert record.state == "done"
    (moved,) = record.requests
    assert (moved.outcome, moved.pause_ms) == ("moved", 12.0)
    assert moved.predicted_ms is not None
    assert request.at == "b"
    assert other.at == "a"
    assert record.rounds[0].tokens >= PROMPT
    gaps = [r.gap for r in record.rounds]
    assert gaps == sorted(gaps, reverse=True)
    assert world.engines["b"].prepared == {}


def test_instance_moves_with_its_running_and_newly_arriving_requests() -> None:
    world = World()
    requests = [world.request() for _ in range(5)]
    world.migrator()
    order = world.order()
    until(world, MoveRequest)
    assert sum(isinstance(letter.ask.message, PrepareResume | ReadTokens | MoveRequest) for letter in world.letters) <= 2
    late = world.request()
    world.settle()
    assert {r.at for r in (*requests, late)} == {"b"}
    assert world.record(order).state == "done"
    assert len(world.record(order).requests) == 6


def test_request_that_cannot_move_is_reported_and_stays() -> None:
    world = World()
    fixed, free = world.request(fixed="an embedding"), world.request()
    record = world.migrate()
    assert (fixed.at, free.at) == ("a", "b")
    assert record.state == "failed"
    assert record.error is not None
    assert "1 of 2 requests were not moved: an embedding" in record.error.message


@pytest.mark.parametrize("kind", [ReadTokens, PrepareResume])
def test_request_whose_tokens_do_not_fit_in_a_message_stays(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Neither its source nor its destination is gone: other requests move."""
    world = World()
    long, short = world.request(), world.request()
    answer = World._do

    def do(self: World, ask: Ask) -> Message:
        if isinstance(ask.message, kind) and ask.key.endswith(f":{long.attempt_id}"):
            raise PayloadTooLarge("It would have 2000000 bytes, and NATS takes 1000000")
        return answer(self, ask)

    monkeypatch.setattr(World, "_do", do)
    record = world.migrate()
    assert (long.at, short.at) == ("a", "b")
    assert {m.outcome for m in record.requests} == {"fixed", "moved"}
    assert record.error is not None
    assert "1 of 2 requests were not moved: It would have 2000000 bytes" in record.error.message


def test_migration_that_would_not_converge_is_given_up_without_effect() -> None:
    world = World(options=Options(pause_ms=20.0))
    world.engines["b"].ms_per_token = 40.0
    request = world.request(tokens=200.0)
    record = world.migrate(request)
    assert record.state == "given_up"
    assert record.requests[0].reason.startswith("given up")
    assert request.at == "a"
    assert request.moves == []
    assert world.engines["b"].prepared == {}


def test_one_late_round_does_not_end_a_migration(monkeypatch: pytest.MonkeyPatch) -> None:
    """One late round does not end a migration.

    Measured with two vLLMs that share two cores: round times in ms, and the source's new tokens
    meanwhile.
    """
    world = World()
    late = [(859.0, 27), (181.0, 12), (93.0, 16), (30.0, 4)]
    asked: list[int] = []

    def took_ms(engine: Engine, tokens: int) -> float:
        if tokens not in asked:  # each round is asked twice
            asked.append(tokens)
        took, gap = late[min(asked.index(tokens), len(late) - 1)]
        world.rate = gap / took * 1e3
        return took

    monkeypatch.setattr(Engine, "took_ms", took_ms)
    request = world.request(tokens=91.0)
    record = world.migrate(request)
    assert record.state == "done", record.requests[0].reason
    assert request.at == "b"
    assert [r.gap for r in record.rounds][:3] == [27, 12, 16]


def test_long_context_is_computed_in_slices_at_the_learned_speed() -> None:
    world = World()
    world.engines["b"].ms_per_token = 4.0
    request = world.request(tokens=4000.0)
    record = world.migrate(request)
    assert record.state == "done"
    assert request.at == "b"
    assert len([r for r in record.rounds if r.tokens == 500]) >= 8
    gaps = [r.gap for r in record.rounds]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] <= 10


def test_destination_without_prepare_resumes_from_its_own_cache() -> None:
    world = World()
    world.engines["b"].prepares = False
    request = world.request()
    world.migrator()
    order = world.order(request)
    letter = until(world, MoveRequest)
    assert isinstance(letter.ask.message, MoveRequest)
    assert letter.ask.message.prepared == ""
    world.settle()
    assert world.record(order).state == "done"
    assert request.at == "b"


@pytest.mark.parametrize("refusal", ["revision", "room"])
def test_refusal_by_the_destination_fails_the_migration(refusal: str) -> None:
    world = World()
    if refusal == "revision":
        world.engines["b"].revision = "r2"
    else:
        world.engines["b"].room = False
    requests = [world.request(), world.request(), world.request()]
    assert world.migrate().state == "failed"
    assert {r.at for r in requests} == {"a"}


def test_prefix_is_prepared_in_the_part_of_the_cache_that_the_request_uses() -> None:
    world = World()
    request = world.request()
    world.migrator()
    world.order(request)
    until(world, PrepareResume)
    orders = [letter.ask.message for letter in world.letters if isinstance(letter.ask.message, PrepareResume)]
    assert {order.cache_salt for order in orders} == {f"salt of {request.name}-1"}


@pytest.mark.parametrize("plan_id", ["p-1", None])
def test_destination_is_sent_the_plan_that_needs_the_memory(plan_id: str | None) -> None:
    world = World()
    request = world.request()
    world.migrator()
    world.put(world.order(request).model_copy(update={"plan_id": plan_id}))
    letter = until(world, PrepareResume)
    assert isinstance(letter.ask.message, PrepareResume)
    assert letter.ask.message.caused_by == (plan_id or "")


def test_request_that_finishes_during_migration_leaves_nothing_prepared() -> None:
    world = World()
    request = world.request()
    world.migrator()
    order = world.order(request)
    world.deliver(until(world, PrepareResume))
    request.at = None
    world.settle()
    assert world.record(order).state == "given_up"
    assert world.record(order).requests[0].outcome == "finished"
    assert "finished before" in world.record(order).requests[0].reason
    assert world.engines["b"].prepared == {}


def test_migration_of_a_finished_request_is_given_up() -> None:
    world = World()
    request = world.request()
    request.at = None
    record = world.migrate(request)
    assert record.state == "given_up"
    assert "finished before" in record.requests[0].reason


@pytest.mark.parametrize("step", [ReadTokens, PrepareResume, MoveRequest])
@pytest.mark.parametrize("victim", ["a", "b"])
def test_an_engine_dies_in_each_step(step: type, victim: str) -> None:
    world = World()
    request = world.request()
    world.migrator()
    order = world.order(request)
    until(world, step)
    world.kill(victim)
    world.settle()
    record = world.record(order)
    assert record.state in ("failed", "given_up")
    assert request.at == ("c" if victim == "a" else "a")
    assert record.error is not None
    assert world.engines["b"].prepared == {}


def test_share_of_an_instance_moves_and_the_others_stay() -> None:
    world = World()
    requests = [world.request() for _ in range(5)]
    world.migrator()
    order = world.order(at_most=2)
    until(world, MoveRequest)
    requests.append(world.request())
    world.settle()
    assert world.record(order).state == "done"
    assert sorted(str(r.at) for r in requests) == ["a"] * 4 + ["b"] * 2


@pytest.mark.parametrize("step", [ReadTokens, PrepareResume, MoveRequest])
def test_share_is_not_larger_after_the_owner_dies(step: type) -> None:
    world = World()
    requests = [world.request() for _ in range(5)]
    first, second = world.migrator(), world.migrator()
    order = world.order(at_most=2)
    until(world, step)
    (first if first.work is not None else second).alive = False
    world.settle()
    assert world.record(order).state == "done"
    assert sum(r.at == "b" for r in requests) == 2


@pytest.mark.parametrize("step", [ReadTokens, PrepareResume, MoveRequest])
def test_second_migrator_finishes_after_the_owner_dies_in_any_step(step: type) -> None:
    world = World()
    requests = [world.request(), world.request(), world.request()]
    first, second = world.migrator(), world.migrator()
    order = world.order()
    letter = until(world, step)
    owner = first if first.work is not None else second
    owner.alive = False
    died = world.now
    world.settle()
    assert world.now - died >= LEASE_S
    assert letter.migrator is owner
    assert world.record(order).state == "done"
    assert {r.at for r in requests} == {"b"}
    assert all(r.moves == ["b"] for r in requests)
    assert all(m.outcome == "moved" for m in world.record(order).requests)
    assert world.engines["b"].prepared == {}


@pytest.mark.parametrize("at", [None, "c"])
def test_request_that_leaves_the_source_after_the_owner_dies_leaves_nothing_prepared(at: str | None) -> None:
    world = World()
    request = world.request()
    first, second = world.migrator(), world.migrator()
    order = world.order(request)
    world.deliver(until(world, PrepareResume))
    (first if first.work is not None else second).alive = False
    assert world.engines["b"].prepared
    world.resume(request, at)
    world.settle()
    assert world.record(order).requests[0].outcome == "finished"
    assert world.engines["b"].prepared == {}


def test_destination_that_dies_with_a_round_is_noticed_before_the_deadline_of_the_round() -> None:
    world = World()
    request = world.request()
    world.migrator()
    order = world.order(request)
    letter = until(world, PrepareResume)
    world.letters.remove(letter)  # its reply dies with the destination
    world.kill("b")
    died = world.now
    world.settle()
    assert world.now - died < letter.ask.message.deadline_ms / 1e3
    assert world.record(order).state == "failed"
    assert request.at == "a"


def test_late_round_of_a_living_destination_is_awaited() -> None:
    world = World()
    world.engines["b"].ms_fixed = 4_500.0
    request = world.request()
    record = world.migrate(request)
    assert record.requests[0].tokens is not None
    assert record.rounds
    assert record.error is None


def test_migrator_that_lost_its_lease_stops() -> None:
    world = World()
    request = world.request()
    first = world.migrator()
    order = world.order(request)
    until(world, PrepareResume)
    world.put(world.record(order).model_copy(update={"owner": "another"}))
    first.unsaved = None
    world.step()
    assert first.work is None
    assert first.ended[-1].lost
    world.settle()  # the other request is never answered: the lease ends
    assert world.record(order).state == "done"


def test_a_cancelled_migration_is_undone() -> None:
    world = World()
    request = world.request()
    migrator = world.migrator()
    order = world.order(request)
    world.deliver(until(world, PrepareResume))
    assert world.engines["b"].prepared
    world.cancel(order)
    migrator.poll()
    assert migrator.work is None
    world.settle()
    assert request.at == "a"
    assert world.engines["b"].prepared == {}


def test_nats_restart_delays_a_migration_without_changing_it() -> None:
    world = World()
    requests = [world.request(), world.request()]
    world.migrator()
    order = world.order()
    until(world, PrepareResume)
    world.connected = False
    since = world.now
    while world.now - since < 2.0:
        world.step()
    world.connected = True
    world.settle()
    assert world.record(order).state == "done"
    assert {r.at for r in requests} == {"b"}


def test_move_whose_answer_is_lost_counts_as_done() -> None:
    world = World()
    request = world.request()
    world.migrator()
    order = world.order(request)
    world.lose(until(world, MoveRequest), done=True)
    world.settle()
    assert world.record(order).state == "done"
    assert request.moves == ["b"]


def test_newer_of_two_migrations_of_one_request_wins() -> None:
    world = World()
    request = world.request()
    world.migrator(), world.migrator()
    old, new = world.order(request, destination="b"), world.order(request, destination="c")
    world.settle()
    assert request.at in ("b", "c")
    assert "done" in (world.record(old).state, world.record(new).state)
    assert all(e.prepared == {} for e in world.engines.values())


def test_two_instances_swap_their_requests() -> None:
    """Two instances swap their requests: pointless, and harmless."""
    world = World()
    here, there = world.request("a"), world.request("b")
    world.migrator(), world.migrator()
    world.order(source="a", destination="b")
    world.order(source="b", destination="a")
    world.settle()
    assert {here.at, there.at} <= {"a", "b"}
    assert all(record.over for record, _ in world.bucket.values())


def test_migration_fails_if_the_gateway_of_its_request_is_gone() -> None:
    world = World()
    request = world.request()
    world.migrator()
    order = world.order(request)
    until(world, MoveRequest)
    world.gateway_alive = False
    world.settle()
    record = world.record(order)
    assert record.state == "failed"
    assert "its gateway is gone" in record.requests[0].reason
    assert world.engines["b"].prepared == {}


@pytest.mark.parametrize("kind", [ListRequests, ReadTokens])
def test_engine_that_does_not_answer_for_seconds_is_asked_again(kind: type) -> None:
    """It may be computing, or have no CPU time."""
    world = World()
    request = world.request()
    world.migrator()
    order = world.order(request)
    for _ in range(4):  # of the lists, each engine's twice
        leave_unanswered(world, kind)
    world.settle()
    assert world.record(order).state == "done"
    assert request.at == "b"


def test_engine_that_stays_silent_counts_as_gone() -> None:
    world = World()
    request = world.request()
    world.migrator()
    order = world.order(request)
    began = world.now
    while not world.record(order).over:
        leave_unanswered(world, ListRequests)
    assert world.record(order).state == "failed"
    assert request.at == "a"
    assert SLOW_S <= world.now - began <= 2 * SLOW_S
