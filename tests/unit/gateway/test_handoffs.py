"""Ordered hand-offs whose destination does not get the request."""

from __future__ import annotations

import time

import pytest

from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.engine_request import EngineRequest
from services.gateway.domain.route_table import Route
from services.gateway.domain.ticket import Ticket
from services.gateway.http.responses.buffered import PassthroughOnly
from services.gateway.requests.active_request import ActiveRequest
from services.gateway.requests.handoff import OrderedHandoff
from shared.contracts.node import InstanceState
from shared.errors import EngineFailed, Unavailable
from tests.support.fake_engine import card_of
from tests.unit.gateway.recorded_effects import RecordedEffects, instance, status, ticket


class Moving(RecordedEffects):
    """A request on the instance `i`, which is to be handed off to `j`."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher = Dispatcher("gw", self)
        self.dispatcher.on_status(status(instance("i"), instance("j")), time.monotonic())
        self.ticket = ticket("r", now=time.monotonic())
        sink = PassthroughOnly()
        self.request = ActiveRequest(self.ticket, card_of("m"), EngineRequest("other", b"{}"), sink, self.dispatcher, 1 << 20)
        self.dispatcher.on_request(self.ticket, 1, time.monotonic())
        self.order = self.request.handoffs.ordered = OrderedHandoff("migration", 1, "j", "")

    def send(self, ticket: Ticket, route: Route) -> None:
        super().send(ticket, route)
        self.request.begin_attempt(route, time.monotonic())


@pytest.mark.parametrize("how", ["yielded", "lost"])
async def test_order_fails_if_its_request_is_sent_to_another_instance(how: str) -> None:
    """Otherwise it would refuse all later orders, and its own sender would wait for an answer."""
    moving, now = Moving(), time.monotonic()
    moving.dispatcher.on_status(status(instance("i"), instance("j", state=InstanceState.DRAINING), instance("k")), time.monotonic())
    if how == "yielded":
        moving.dispatcher.on_yielded(moving.ticket, "j", now)
    else:
        moving.dispatcher.on_engine_lost(moving.ticket, EngineFailed("it ended"), now)
    assert [where for _, where in moving.sent] == ["i", "i" if how == "yielded" else "k"]
    assert moving.request.handoffs.ordered is None
    assert isinstance(moving.order.result.exception(), Unavailable)


async def test_order_remains_while_its_request_is_sent_to_the_destination() -> None:
    moving, now = Moving(), time.monotonic()
    moving.dispatcher.on_yielded(moving.ticket, "j", now)
    assert [where for _, where in moving.sent] == ["i", "j"]
    assert moving.request.handoffs.ordered is moving.order
    moving.request.handoffs.output_arrived("j", now)
    assert moving.order.result.result().instance_id == "j"
