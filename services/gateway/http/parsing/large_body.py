"""Reading of a body that exceeds a NATS message, into a file of the gateway."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from services.gateway.adapters.held_bodies import BodyFile, BodyScope
from services.gateway.domain.admission import Reservation
from services.gateway.domain.body_outline import FormOutline, JsonOutline, Outline
from services.gateway.domain.held_request import too_large
from services.gateway.http.parsing.body import BodyReceiver
from services.gateway.http.parsing.cooperative import SLICE_BYTES, TimeSlice
from services.gateway.http.parsing.idempotency_key import HEADER
from services.gateway.http.parsing.multipart import boundary_of, is_form
from shared.contracts.request_body import HeldBody
from shared.errors import InvalidRequest, RequestTimeout, ThawError

_WRITE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class ReceivedBody:
    """A body as it was received.

    Attributes:
        content: The body; its outline if a file has it.
        held: The body in its file; None if it fits a message.
        digest: SHA-256 of a body in a file whose request has an Idempotency-Key, in hexadecimal.
    """

    content: bytes
    held: HeldBody | None = None
    digest: str = ""


@dataclass(frozen=True)
class LargeBodyLimits:
    """Bounds of one body.

    Attributes:
        body_bytes: Maximum bytes of the body.
        message_bytes: Maximum bytes of its outline, which goes to the engine in a message.
        timeout_s: Time that the body may take.
        left_s: The time that is left of it.
    """

    body_bytes: int
    message_bytes: int
    timeout_s: float
    left_s: float


def content_length(scope: Scope) -> int | None:
    """Return the announced bytes of a body; None if it is sent in chunks."""
    value = Headers(scope=scope).get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() else None


async def hold_body(
    scope: Scope,
    receive: BodyReceiver,
    beginning: list[bytes],
    limits: LargeBodyLimits,
    bodies: BodyScope,
    reservation: Reservation,
) -> ReceivedBody:
    """Read a body into a file.

    Room for an announced length is reserved before the body is read, so that uploads at the same
    time do not fail each other half-way.

    Args:
        beginning: Parts of the body that have been received already.
        reservation: Counts the bytes against the gateway's bound of held bodies.

    Raises:
        PayloadTooLarge: The body, or its outline, exceeds its limit.
        QueueFull: The gateway has no room for more bytes of held bodies.
        RequestTimeout: The body was not complete in time.
        StoreFull: The gateway's disk is full.
    """
    try:
        async with asyncio.timeout(limits.left_s):
            announced = content_length(scope)
            if announced is not None and announced > limits.body_bytes:
                raise too_large(limits.body_bytes)
            reservation.grow(announced or 0)
            writer = _Writer(await bodies.open(), _outline_of(scope), limits, reservation, announced or 0)
            if HEADER in Headers(scope=scope):
                writer.hash = hashlib.sha256()
            for data in beginning:
                await writer.write(data)
            while not receive.is_complete:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise InvalidRequest("The client disconnected before its request was complete")
                await writer.write(message.get("body", b""))
            return await writer.finish(bodies.gateway_id)
    except TimeoutError:
        raise RequestTimeout(f"The body was not complete within {limits.timeout_s:g} s. Repeat the request") from None
    except ThawError:
        await receive.discard(limits.timeout_s)
        raise


def _outline_of(scope: Scope) -> Outline:
    content_type = Headers(scope=scope).get("content-type", "")
    return FormOutline(boundary_of(content_type)) if is_form(content_type) else JsonOutline(f"thaw{secrets.token_hex(16)}")


class _Writer:
    """Writes a body, and makes its outline.

    Attributes:
        hash: Set before the first part, to compute the body's digest.
    """

    def __init__(self, file: BodyFile, outline: Outline, limits: LargeBodyLimits, reservation: Reservation, reserved: int) -> None:
        self._file = file
        self._outline = outline
        self._limits = limits
        self._reservation = reservation
        self._reserved = reserved
        self._size = 0
        self._pending = bytearray()
        self.hash: hashlib._Hash | None = None
        self._time_slice = TimeSlice()

    async def write(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limits.body_bytes:
            raise too_large(self._limits.body_bytes)
        if self._size > self._reserved:
            self._reservation.grow(self._size - self._reserved)
            self._reserved = self._size
        for at in range(0, len(data), SLICE_BYTES):
            part = data[at : at + SLICE_BYTES]
            self._outline.feed(part)
            if self.hash is not None:
                self.hash.update(part)
            await self._time_slice.pause()
        if len(self._outline.kept) > self._limits.message_bytes:
            raise too_large(self._limits.message_bytes)
        self._pending += data
        if len(self._pending) >= _WRITE_BYTES:
            await self._flush()

    async def finish(self, gateway_id: str) -> ReceivedBody:
        self._outline.finish()
        await self._flush()
        held = HeldBody(
            gateway_id=gateway_id,
            body_id=self._file.body_id,
            size_bytes=self._size,
            marker=self._outline.marker,
            pieces=tuple(self._outline.pieces),
        )
        return ReceivedBody(bytes(self._outline.kept), held, self.hash.hexdigest() if self.hash is not None else "")

    async def _flush(self) -> None:
        data = bytes(self._pending)
        self._pending.clear()
        await self._file.append(data)
