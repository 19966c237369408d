"""Reading of a request body, bounded in bytes and in time."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope

from services.gateway.domain.admission import Reservation
from shared.errors import InvalidRequest, PayloadTooLarge, RequestTimeout, ThawError

_DISCARDED_BYTES = 256 * 1024 * 1024
"""Bytes of a refused body that are read and discarded, so that the client gets the response."""
_BODY_TIMEOUT_S = 120.0


async def read_body(
    scope: Scope, receive: Receive, limit: int, held: Reservation | None = None, within: float = _BODY_TIMEOUT_S
) -> bytes:
    """Read the whole body. One over a limit is refused after the client has had a chance to send it: a connection closed while a body is
    on its way loses the answer too.

    Args:
        limit: Most bytes of the body.
        held: The account of the gateway's memory that the bytes are added to.
        within: Seconds that the body may take.

    Raises:
        PayloadTooLarge: The body is over `limit` bytes.
        QueueFull: The gateway holds as many bytes of requests as it may.
        RequestTimeout: The body was not complete in time.
    """
    body = _Body(limit, held)
    message = await receive()
    if not body.add(message):
        try:
            async with asyncio.timeout(within):
                while not body.add(await receive()):
                    pass
        except TimeoutError:
            raise RequestTimeout(f"The body was not complete within {within:g} s, so it was given up") from None
    return body.whole()


class _Body:
    """What has come of a body; the bytes of one that is refused are passed over."""

    def __init__(self, limit: int, held: Reservation | None) -> None:
        self._limit = limit
        self._held = held
        self._parts: list[bytes] = []
        self._size = 0
        self._refusal: ThawError | None = None

    def add(self, message: Message) -> bool:
        """Take a message of the server's; True: it was the last."""
        if message["type"] == "http.disconnect":
            raise InvalidRequest("The client left before its request was whole")
        part = message.get("body", b"")
        self._size += len(part)
        if self._size > self._limit:
            self._refuse(PayloadTooLarge(f"The body is over the limit of {self._limit} bytes"))
        elif self._refusal is None:
            self._keep(part)
        return self._size > self._limit + _DISCARDED_BYTES or not message.get("more_body", False)

    def _keep(self, part: bytes) -> None:
        try:
            if self._held is not None:
                self._held.grow(len(part))
            self._parts.append(part)
        except ThawError as e:
            self._refuse(e)

    def _refuse(self, error: ThawError) -> None:
        self._refusal = error
        self._parts.clear()

    def whole(self) -> bytes:
        if self._refusal is not None:
            raise self._refusal
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
