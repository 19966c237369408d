"""A gateway without a connection to NATS: it takes no node for lost, and no request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.gateway.adapters.demand_publisher import DemandPublisher
from services.gateway.domain import failover
from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.engine_request import EngineRequest
from services.gateway.domain.ticket import Ticket
from services.gateway.http.responses.buffered import PassthroughOnly
from services.gateway.http.responses.wait_comments import describe_wait
from services.gateway.requests.active_request import ActiveRequest
from services.gateway.settings import GatewaySettings
from shared.contracts.demand import Demand, DemandNoted
from shared.contracts.node import NODE_LOST_AFTER_S, InstanceState
from shared.errors import QueueTimeout, Unreachable
from shared.messaging import Mesh
from shared.tasks import end
from tests.support.fake_engine import card_of
from tests.unit.gateway.recorded_effects import RecordedEffects, instance, status, ticket


@pytest.fixture
def world() -> RecordedEffects:
    return RecordedEffects()


@pytest.fixture
def dispatcher(world: RecordedEffects) -> Dispatcher:
    return Dispatcher("gw", world)


def ask(dispatcher: Dispatcher, name: str, now: float, *, wait: float = 300.0) -> Ticket:
    made = ticket(name, now=now, wait=wait, response=1e6)
    dispatcher.on_request(made, 9, now)
    return made


def stay_away(dispatcher: Dispatcher, seconds: Sequence[float]) -> None:
    """Let time pass without a connection."""
    for now in seconds:
        dispatcher.on_tick(now, None)


def test_routes_are_kept_for_one_term_of_statuses_after_the_reconnection(dispatcher: Dispatcher) -> None:
    dispatcher.on_status(status(instance("i")), 0)
    stay_away(dispatcher, (1, 6, 600))
    dispatcher.on_reconnected(601)
    dispatcher.on_tick(601 + NODE_LOST_AFTER_S, 601)
    assert dispatcher.routes.get("i") is not None
    dispatcher.on_tick(601.1 + NODE_LOST_AFTER_S, 601)
    assert dispatcher.routes.get("i") is None, "its status would have arrived"


def test_node_that_dies_is_lost_while_the_connection_works(dispatcher: Dispatcher) -> None:
    dispatcher.on_status(status(instance("i")), 100)
    assert not dispatcher.routes.has_silent_node(100 + NODE_LOST_AFTER_S)
    assert dispatcher.routes.has_silent_node(100.1 + NODE_LOST_AFTER_S)
    dispatcher.on_tick(100.1 + NODE_LOST_AFTER_S, 0)
    assert dispatcher.routes.get("i") is None


def test_requests_wait_for_the_connection_and_are_sent_with_it(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i", capacity=4)), 0)
    stay_away(dispatcher, (1,))
    for name in "ab":
        ask(dispatcher, name, 7)
    stay_away(dispatcher, (8, 60))
    assert (world.sent, dispatcher.count_waiting("m")) == ([], 2)
    dispatcher.on_reconnected(61)
    assert world.sent == [("a", "i"), ("b", "i")]
    assert world.demands[-1].waiting == 0


def test_requests_time_out_while_there_is_no_connection(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i")), 0)
    stay_away(dispatcher, (1,))
    ask(dispatcher, "r", 1, wait=30)
    stay_away(dispatcher, (30.9, 31))
    assert isinstance(world.failed["r"], QueueTimeout)


def test_demand_of_requests_that_still_wait_is_published_with_the_reconnection(
    dispatcher: Dispatcher, world: RecordedEffects
) -> None:
    stay_away(dispatcher, (1,))
    ask(dispatcher, "r", 1)
    stay_away(dispatcher, (1.1, 1.2))
    published = len(world.demands)
    dispatcher.on_reconnected(1.3)
    assert [d.waiting for d in world.demands[published:]] == [1]


def test_requests_in_flight_outlast_the_outage(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    """Neither silence nor a last status in which the engine was idle is a loss."""
    dispatcher.on_status(status(instance("i", capacity=4)), 0)
    made = ask(dispatcher, "r", 0)
    dispatcher.on_message(made, 1)
    made.is_committed = True
    stay_away(dispatcher, range(2, 100))
    assert (world.failed, world.probed) == ({}, [])
    dispatcher.on_reconnected(100)
    dispatcher.on_tick(100 + failover.PROBE_SOON_S, 100)
    assert (world.failed, world.probed) == ({}, ["r"])


def test_requests_of_an_engine_that_is_gone_are_lost_after_the_outage(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i"), instance("j")), 0)
    made = ask(dispatcher, "r", 0)
    dispatcher.on_message(made, 1)
    stay_away(dispatcher, (2, 50))
    dispatcher.on_reconnected(50)
    dispatcher.on_status(status(instance("i", state=InstanceState.FAILED), instance("j")), 50.1)
    dispatcher.on_tick(50.2, 50)
    assert world.sent == [("r", "i")], "its last messages may still be under way"
    dispatcher.on_tick(50 + 2 * failover.GONE_GRACE_S, 50)
    assert world.sent == [("r", "i"), ("r", "j")]


def test_engine_that_died_in_the_outage_is_noticed_by_the_first_request(dispatcher: Dispatcher, world: RecordedEffects) -> None:
    dispatcher.on_status(status(instance("i"), instance("j")), 0)
    stay_away(dispatcher, (1, 60))
    made = ask(dispatcher, "r", 60)
    dispatcher.on_reconnected(61)
    dispatcher.on_refused(made, Unreachable("No engine listens"), 61)
    assert world.sent == [("r", "i"), ("r", "j")]


def test_comments_report_the_missing_connection(dispatcher: Dispatcher) -> None:
    stay_away(dispatcher, (0,))
    made = ask(dispatcher, "r", 0)
    request = ActiveRequest(made, card_of("m"), EngineRequest("other", b"{}"), PassthroughOnly(), dispatcher, 1)
    assert describe_wait(request, dispatcher) == "waiting for the gateway's connection to NATS"
    dispatcher.on_reconnected(1)
    assert describe_wait(request, dispatcher).startswith("waking m")


async def test_demand_is_not_sent_without_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would arrive with the reconnection, when the requests have been sent."""
    mesh, asked = Mesh(GatewaySettings(home=tmp_path), "gateway-test"), list[Demand]()
    has_asked = asyncio.Event()

    async def request(subject: str, demand: Demand, reply: type[DemandNoted]) -> DemandNoted:
        asked.append(demand)
        has_asked.set()
        return DemandNoted(outlook="starting")

    monkeypatch.setattr(mesh, "request", request)
    publisher = DemandPublisher(mesh, lambda demand, noted: None, lambda demand, error: None)
    publishing = asyncio.create_task(publisher.run())
    try:
        publisher.publish(Demand(gateway="gw", model="m", waiting=2))
        for _ in range(10):  # all that is due runs
            await asyncio.sleep(0)
        assert asked == []
        publisher.publish(Demand(gateway="gw", model="m", waiting=0))
        async with asyncio.timeout(30):
            await has_asked.wait()
        assert [d.waiting for d in asked] == [0], "the scheduler forgets the demand"
    finally:
        await end(publishing)
