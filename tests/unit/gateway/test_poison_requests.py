"""A request that kills its engines fails soon.

It takes as few engines and other requests with it as possible.
"""

from __future__ import annotations

from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.failover import MAX_MESSAGE_LOSSES
from shared.contracts.node import InstanceState
from shared.errors import EngineFailed, EngineKilled, ShuttingDown, ThawError
from tests.unit.gateway.recorded_effects import RecordedEffects, instance, status, ticket

ENDED = EngineFailed("it ended")


class World:
    """A gateway with engines for four requests each, which die one after the other."""

    def __init__(self) -> None:
        self.seen = RecordedEffects()
        self.dispatcher = Dispatcher("gw", self.seen)
        self.tickets = {name: ticket(name, wait=1e6) for name in ("a", "b", "poison")}
        self.now = 0.0

    def ready(self, name: str) -> None:
        self.now += 10
        self.dispatcher.on_status(status(instance(name, capacity=4)), self.now)

    def ask(self, *names: str) -> None:
        for name in names:
            self.dispatcher.on_request(self.tickets[name], 8, self.now)

    def progress(self, name: str) -> None:
        self.dispatcher.on_progress(self.tickets[name], self.now)

    def dies(self, name: str, error: ThawError = ENDED) -> None:
        """Lose all requests that the engine serves."""
        self.now += 10
        self.dispatcher.on_status(status(instance(name, state=InstanceState.FAILED)), self.now)
        for each in self.tickets.values():
            if each.instance_id == name:
                self.dispatcher.on_engine_lost(each, error, self.now)

    def sent(self, to: str) -> list[str]:
        return [request for request, instance_id in self.seen.sent if instance_id == to]


def test_poison_request_alone_fails_after_two_engine_deaths() -> None:
    world = World()
    world.ready("i")
    world.ask("poison")
    world.dies("i")
    world.ready("j")
    world.dies("j")
    assert len(world.seen.sent) == 2
    failed = world.seen.failed["poison"]
    assert "2 engines in a row" in failed.message
    assert failed.should_retry is False


def test_killed_engines_count_less_against_a_request() -> None:
    """Killed engines do not count against a request.

    Chaos seed 1: two kills of the engine that served a request alone failed that request as their
    cause.
    """
    world = World()
    world.ready("e0")
    world.ask("poison")
    for n in range(MAX_MESSAGE_LOSSES):
        world.dies(f"e{n}", EngineKilled("killed by signal 9"))
        assert "poison" not in world.seen.failed
        world.ready(f"e{n + 1}")
    world.dies(f"e{MAX_MESSAGE_LOSSES}", EngineKilled("killed by signal 9"))
    assert "poison" in world.seen.failed, "not for ever either"


def test_a_shared_engine_dies_four_times_and_only_the_poison_request_fails() -> None:
    world = World()
    world.ready("i")
    world.ask("a", "b", "poison")
    world.dies("i")
    world.ready("j")
    assert world.sent("j") == ["a", "b", "poison"]
    world.dies("j")
    world.ready("k")
    assert world.sent("k") == ["a"], "each of them may be what the engines died of"
    world.progress("a")
    assert world.sent("k") == ["a", "b"]
    world.progress("b")
    assert world.sent("k") == ["a", "b", "poison"]
    world.dies("k")
    world.ready("l")
    assert world.sent("l") == ["a", "b", "poison"], "two of them are beyond suspicion"
    world.progress("a")
    world.progress("b")
    world.dies("l")
    assert set(world.seen.failed) == {"poison"}
    assert "4 engines in a row" in world.seen.failed["poison"].message
    world.ready("m")
    assert world.sent("m") == ["a", "b"]


def test_unrelated_requests_are_not_delayed() -> None:
    world = World()
    world.ready("i")
    world.ask("a", "poison")
    world.dies("i")
    world.ready("j")
    world.dies("j")
    world.tickets["new"] = ticket("new", now=world.now, wait=1e6)
    world.ask("new")
    world.ready("k")
    assert world.sent("k") == ["a", "new"]


def test_token_between_engine_deaths_resets_the_count() -> None:
    world = World()
    world.ready("i0")
    world.ask("a")
    for n in range(5):
        world.progress("a")
        world.dies(f"i{n}")
        world.ready(f"i{n + 1}")
    assert not world.seen.failed


def test_a_stopped_engine_does_not_count_as_a_death() -> None:
    world = World()
    world.ready("i0")
    world.ask("a")
    for n in range(MAX_MESSAGE_LOSSES):
        world.dies(f"i{n}", ShuttingDown("the engine was stopped while it was answering"))
        world.ready(f"i{n + 1}")
    assert not world.seen.failed
