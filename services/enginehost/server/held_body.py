"""Request bodies that exceed a message: read from the gateway that holds them, while they are sent.

The host has a few parts of a body at a time, and never the whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from services.enginehost.http1 import BodyStream, HttpRequest
from shared.contracts import subjects
from shared.contracts.request_body import BODY_PART_BYTES, HeldBody, HeldPiece, ReadBodyPart
from shared.errors import BodyLost, DeadlineExceeded, Unreachable
from shared.messaging import Mesh
from shared.messaging.body_parts import decode_body_part
from shared.tasks import end

_MAX_BODIES = 4
"""Bodies that are read at a time; others wait, within the deadlines of their requests."""
_GONE_S = 10.0
"""A gateway that does not answer for this long has ended, and its clients with it."""
_RETRY_S = 0.2


class HeldBodyReader:
    """Reads the bodies of one instance's requests."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._slots = asyncio.Semaphore(_MAX_BODIES)

    def attach(self, outgoing: HttpRequest, held: HeldBody) -> HttpRequest:
        """Return the request with the client's body.

        Args:
            outgoing: The request to the engine, with markers in its body where the gateway has
                pieces of it. Without markers the body is the client's as it is.
        """
        whole = HeldPiece(offset=0, size_bytes=held.size_bytes)
        segments: list[bytes | HeldPiece] = held.split(outgoing.body) if held.marker else [whole]
        size_bytes = sum(len(s) if isinstance(s, bytes) else s.size_bytes for s in segments)
        return replace(outgoing, body=b"", stream=BodyStream(size_bytes, lambda: self._read(held, segments)))

    async def _read(self, held: HeldBody, segments: list[bytes | HeldPiece]) -> AsyncIterator[bytes]:
        async with self._slots:
            for segment in segments:
                if isinstance(segment, bytes):
                    yield segment
                    continue
                async for part in self._read_piece(held, segment):
                    yield part

    async def _read_piece(self, held: HeldBody, piece: HeldPiece) -> AsyncIterator[bytes]:
        """Yield the parts of a piece; the next is read while the engine gets the present one."""
        at, last = piece.offset, piece.offset + piece.size_bytes
        reading = self._begin_to_read(held, at, last)
        try:
            while at < last:
                part = await reading
                at += len(part)
                if at < last:
                    reading = self._begin_to_read(held, at, last)
                yield part
        finally:
            await end(reading)

    def _begin_to_read(self, held: HeldBody, offset: int, last: int) -> asyncio.Task[bytes]:
        reading = asyncio.create_task(self._read_part(held, offset, last), name="body part")
        reading.add_done_callback(lambda t: t.cancelled() or t.exception())  # it may not be awaited
        return reading

    async def _read_part(self, held: HeldBody, offset: int, last: int) -> bytes:
        """Read from `offset`, at most up to `last`.

        Raises:
            BodyLost: The gateway has ended, or its request has.
        """
        limit = min(BODY_PART_BYTES, last - offset)
        request = ReadBodyPart(body_id=held.body_id, offset=offset, limit=limit)
        until = time.monotonic() + _GONE_S
        while True:
            try:
                return decode_body_part(await self._mesh.fetch(subjects.body_parts(held.gateway_id), request), offset)
            except (Unreachable, DeadlineExceeded) as e:  # the gateway, or NATS, may be reconnecting
                if time.monotonic() > until:
                    raise BodyLost("The gateway that holds the request's body does not answer. Repeat the request") from e
            await asyncio.sleep(_RETRY_S)
