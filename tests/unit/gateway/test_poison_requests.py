"""A request that kills its engines fails soon, with few engines and no other request."""

from __future__ import annotations

from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.failover import MAX_MESSAGE_LOSSES
from shared.contracts.node import InstanceState
from shared.errors import EngineFailed, EngineKilled, ShuttingDown, ThawError
from tests.unit.gateway.recorded_effects import RecordedEffects, instance, status, ticket

DEATH = EngineFailed("the engine ended")


class World:
    """A gateway with engines that serve four requests each, and die one after another."""

    def __init__(self) -> None:
        self.effects = RecordedEffects()
        self.dispatcher = Dispatcher("gw", self.effects)
        self.tickets = {name: ticket(name, wait=1e6) for name in ("a", "b", "poison")}
        self.now = 0.0

    def start(self, name: str) -> None:
        """Add an engine, which gets the waiting requests."""
        self.now += 10
        self.dispatcher.on_status(status(instance(name, capacity=4)), self.now)

    def request(self, *names: str) -> None:
        for name in names:
            self.dispatcher.on_request(self.tickets[name], 8, self.now)

    def progress(self, name: str) -> None:
        """Receive the first output of a request."""
        self.dispatcher.on_progress(self.tickets[name], self.now)

    def kill(self, name: str, error: ThawError = DEATH) -> None:
        """End an engine: it loses all requests that it serves."""
        self.now += 10
        self.dispatcher.on_status(status(instance(name, state=InstanceState.FAILED)), self.now)
        for each in self.tickets.values():
            if each.instance_id == name:
                self.dispatcher.on_engine_lost(each, error, self.now)

    def sent_to(self, name: str) -> list[str]:
        """Return the requests that an engine got, in order."""
        return [request for request, instance_id in self.effects.sent if instance_id == name]


def test_poison_request_alone_fails_after_two_engine_deaths() -> None:
    world = World()
    world.start("i")
    world.request("poison")
    world.kill("i")
    world.start("j")
    world.kill("j")
    assert len(world.effects.sent) == 2
    failed = world.effects.failed["poison"]
    assert "2 engines in a row" in failed.message
    assert failed.should_retry is False


def test_killed_engines_count_less_against_a_request() -> None:
    """An operator's kills are not the request's fault, but do not repeat it for ever.

    With chaos seed 1, two kills of an engine failed the request that it served alone.
    """
    world = World()
    world.start("e0")
    world.request("poison")
    for n in range(MAX_MESSAGE_LOSSES):
        world.kill(f"e{n}", EngineKilled("killed by signal 9"))
        assert "poison" not in world.effects.failed
        world.start(f"e{n + 1}")
    world.kill(f"e{MAX_MESSAGE_LOSSES}", EngineKilled("killed by signal 9"))
    assert "poison" in world.effects.failed, "too many losses fail any request"


def test_a_shared_engine_dies_four_times_and_only_the_poison_request_fails() -> None:
    world = World()
    world.start("i")
    world.request("a", "b", "poison")
    world.kill("i")
    world.start("j")
    assert world.sent_to("j") == ["a", "b", "poison"]
    world.kill("j")
    world.start("k")
    assert world.sent_to("k") == ["a"], "suspects are tried one at a time: each may have killed the engines"
    world.progress("a")
    assert world.sent_to("k") == ["a", "b"]
    world.progress("b")
    assert world.sent_to("k") == ["a", "b", "poison"]
    world.kill("k")
    world.start("l")
    assert world.sent_to("l") == ["a", "b", "poison"], "the two with output are suspects no more"
    world.progress("a")
    world.progress("b")
    world.kill("l")
    assert set(world.effects.failed) == {"poison"}
    assert "4 engines in a row" in world.effects.failed["poison"].message
    world.start("m")
    assert world.sent_to("m") == ["a", "b"]


def test_unrelated_requests_are_not_delayed() -> None:
    world = World()
    world.start("i")
    world.request("a", "poison")
    world.kill("i")
    world.start("j")
    world.kill("j")
    world.tickets["new"] = ticket("new", now=world.now, wait=1e6)
    world.request("new")
    world.start("k")
    assert world.sent_to("k") == ["a", "new"]


def test_token_between_engine_deaths_resets_the_count() -> None:
    world = World()
    world.start("i0")
    world.request("a")
    for n in range(5):
        world.progress("a")
        world.kill(f"i{n}")
        world.start(f"i{n + 1}")
    assert not world.effects.failed


def test_a_stopped_engine_does_not_count_as_a_death() -> None:
    world = World()
    world.start("i0")
    world.request("a")
    for n in range(MAX_MESSAGE_LOSSES):
        world.kill(f"i{n}", ShuttingDown("the engine was stopped while it was answering"))
        world.start(f"i{n + 1}")
    assert not world.effects.failed
