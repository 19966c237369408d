"""Receiving of a request's body: in memory, or in a file if it exceeds a message."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace

from starlette.types import Receive, Scope

from services.gateway.domain.admission import Reservation
from services.gateway.domain.client_address import client_of_address
from services.gateway.domain.held_request import can_hold_body, too_large
from services.gateway.http.parsing.body import BodyReceiver, read_body_or_beginning
from services.gateway.http.parsing.large_body import LargeBodyLimits, ReceivedBody, hold_body
from services.gateway.http.parsing.request_parser import ParsedRequest
from services.gateway.http.scopes import caller_of
from services.gateway.loop import Gateway
from shared.contracts.inference import Endpoint


@dataclass(frozen=True)
class ReceivedRequest:
    """A request whose body is complete.

    Attributes:
        arrived_at: When it arrived, by the monotonic clock.
        reservation: Its bytes in the gateway's memory.
    """

    body: ReceivedBody
    reservation: Reservation
    arrived_at: float

    def with_held(self, parsed: ParsedRequest) -> ParsedRequest:
        """Add the body in its file to the request that was parsed from its outline."""
        if self.body.held is None:
            return parsed
        engine_request = replace(parsed.engine_request, held=self.body.held, held_digest=self.body.digest)
        return replace(parsed, engine_request=engine_request)


def client_of(scope: Scope) -> str:
    """Name the client for admission control by its valid API key, or else its address.

    A key that no gateway knows proves nothing: a client could send another one with each request.
    """
    client = scope.get("client")
    return caller_of(scope).digest or (f"address {client_of_address(client[0])}" if client else "")


@contextlib.asynccontextmanager
async def receive_request(
    gateway: Gateway, scope: Scope, receive: Receive, limit: int, endpoints: Iterable[Endpoint]
) -> AsyncIterator[ReceivedRequest]:
    """Receive a body, which is deleted when the block ends.

    Args:
        limit: Maximum bytes of a body that is sent in a message. A larger one is written to a file.
        endpoints: The endpoints of which the request may turn out to be. If no model takes larger
            bodies there, they are refused.

    Raises:
        PayloadTooLarge: The body exceeds its limit.
        QueueFull: The gateway has no room for more bytes of requests.
        RequestTimeout: The body was not complete in time.
        StoreFull: The gateway's disk is full.
    """
    arrived_at, settings = time.monotonic(), gateway.settings
    with contextlib.ExitStack() as opened:
        reservation = opened.enter_context(gateway.admission.begin(client_of(scope)))
        receiver = BodyReceiver(receive)
        read = await read_body_or_beginning(receiver, limit, reservation, settings.body_timeout)
        if isinstance(read, bytes):
            yield ReceivedRequest(ReceivedBody(read), reservation, arrived_at)
            return
        cards = gateway.catalog.cards()
        if not settings.max_held_bytes or not any(can_hold_body(endpoint, card) for endpoint in endpoints for card in cards):
            await receiver.discard(settings.body_timeout)
            raise too_large(limit)
        left_s = settings.body_timeout - (time.monotonic() - arrived_at)
        limits = LargeBodyLimits(settings.max_body_bytes, limit, settings.body_timeout, left_s=left_s)
        bodies = opened.enter_context(gateway.bodies.scope())
        held_reservation = opened.enter_context(gateway.held_admission.begin(client_of(scope)))
        body = await hold_body(scope, receiver, read, limits, bodies, held_reservation)
        yield ReceivedRequest(body, reservation, arrived_at)
