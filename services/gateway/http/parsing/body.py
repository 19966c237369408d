"""Reading of a request body, bounded in bytes and in time."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import Message, Receive, Scope

from services.gateway.domain.admission import Reservation
from shared.errors import InvalidRequest, PayloadTooLarge, RequestTimeout, ThawError

_DISCARDED_BYTES = 256 * 1024 * 1024
"""Bytes of a refused body that are read and discarded, so that the client gets the response."""
_BODY_TIMEOUT_S = 120.0


async def read_body(
    scope: Scope,
    receive: Receive,
    limit: int,
    reservation: Reservation | None = None,
    timeout_s: float = _BODY_TIMEOUT_S,
) -> bytes:
    """Read a whole body.

    A body over a limit is refused only after the client has had a chance to send it: closing the
    connection during the transfer would lose the response too.

    Args:
        limit: Maximum bytes of the body.
        reservation: Counts the bytes against the gateway's memory.
        timeout_s: Time that the body may take.

    Raises:
        PayloadTooLarge: The body exceeds `limit` bytes.
        QueueFull: The gateway has no room for more bytes of requests.
        RequestTimeout: The body was not complete in time.
    """
    body = _Body(limit, reservation)
    await _read(body, receive, timeout_s)
    return body.get_whole()


async def read_body_or_beginning(receive: Receive, limit: int, reservation: Reservation, timeout_s: float) -> bytes | list[bytes]:
    """Read a whole body as `read_body`, or the parts that have arrived once it exceeds `limit`."""
    body = _Body(limit, reservation, stops_at_limit=True)
    await _read(body, receive, timeout_s)
    return body.beginning if body.beginning else body.get_whole()


async def _read(body: _Body, receive: Receive, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not body.add(await receive()):
                pass
    except TimeoutError:
        raise RequestTimeout(f"The body was not complete within {timeout_s:g} s. Repeat the request") from None


class BodyReceiver:
    """Receive the messages of a body that is handled while it arrives."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_complete = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.is_complete = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message

    async def discard(self, timeout_s: float) -> None:
        """Read the rest of a refused body.

        Closing the connection during its transfer would lose the response too.
        """
        discarded = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.is_complete and discarded <= _DISCARDED_BYTES:
                    discarded += len((await self()).get("body", b""))


class _Body:
    """The parts of a body. Those of a refused body are discarded.

    Attributes:
        beginning: The parts of a body that exceeded the limit and was not read to its end.
    """

    def __init__(self, limit: int, reservation: Reservation | None, *, stops_at_limit: bool = False) -> None:
        self.beginning: list[bytes] = []
        self._stops_at_limit = stops_at_limit
        self._limit = limit
        self._reservation = reservation
        self._parts: list[bytes] = []
        self._size = 0
        self._refusal: ThawError | None = None

    def add(self, message: Message) -> bool:
        """Add a message of the server. Returns whether it was the last."""
        if message["type"] == "http.disconnect":
            raise InvalidRequest("The client disconnected before its request was complete")
        part = message.get("body", b"")
        self._size += len(part)
        if self._size > self._limit and self._stops_at_limit and self._refusal is None:
            self.beginning = [*self._parts, part]
            return True
        if self._size > self._limit:
            self._refuse(PayloadTooLarge(f"The body exceeds the limit of {self._limit} bytes. Send a smaller one"))
        elif self._refusal is None:
            self._keep(part)
        return self._size > self._limit + _DISCARDED_BYTES or not message.get("more_body", False)

    def _keep(self, part: bytes) -> None:
        try:
            if self._reservation is not None:
                self._reservation.grow(len(part))
            self._parts.append(part)
        except ThawError as e:
            self._refuse(e)

    def _refuse(self, error: ThawError) -> None:
        self._refusal = error
        self._parts.clear()

    def get_whole(self) -> bytes:
        """Return the body, or raise its refusal."""
        if self._refusal is not None:
            raise self._refusal
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
