"""Requests with an Idempotency-Key: generated once, answered to whoever brings the key."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable

from nats.errors import Error as NatsError
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from services.gateway.adapters.idempotency import MAX_ANSWER_BYTES, Answer, Claim, IdempotencyStore, digest
from services.gateway.http.answers import EVENT_STREAM
from services.gateway.http.errors import error_object
from services.gateway.http.keys import Keys
from services.gateway.http.sse import comment, event
from services.gateway.settings import GatewaySettings
from shared.errors import InvalidRequest, ThawError

log = logging.getLogger(__name__)
HEADER = "idempotency-key"
REPLAYED = "idempotent-replayed"
_VALID = re.compile(r"[\x21-\x7e]{1,255}")
Produce = Callable[[Send], Awaitable[bool]]
"""Writes the answer; whether it is whole and good."""


class IdempotencyKeyReused(InvalidRequest):
    """The Idempotency-Key came before with another body."""

    code, status = "idempotency_key_reused", 422


class Once:
    def __init__(self, store: IdempotencyStore, settings: GatewaySettings) -> None:
        self._store = store
        self._settings = settings

    async def answer(self, body: bytes, stream: bool, scope: Scope, receive: Receive, send: Send, produce: Produce) -> None:
        """Answer from the store, or by `produce` and into the store."""
        headers = Headers(scope=scope)
        given = headers.get(HEADER, "")
        if not _VALID.fullmatch(given):
            raise InvalidRequest("Idempotency-Key must be 1 to 255 printable characters")
        key = digest(Keys.of(headers.get("authorization")).encode(), scope["path"].encode(), given.encode())
        out = _Late(send)
        try:
            found = await self._claimed(key, digest(body), stream, receive, out)
            if isinstance(found, Claim):
                await _produce(found, out, produce)
            elif found is not None:
                await _replay(found, out)
        except ThawError as e:
            if not out.begun:
                raise
            await out({"type": "http.response.body", "body": event(error_object(e)), "more_body": False})

    async def _claimed(self, key: str, request: str, stream: bool, receive: Receive, out: _Late) -> Claim | Answer | None:
        """Wait for the key; None when the client has left meanwhile. A stream that waits long hears that it does."""
        claiming = asyncio.create_task(self._store.claim(key, request), name="idempotency claim")
        leaving = asyncio.create_task(_left(receive), name="client")
        patience = self._settings.waking_comment_after
        try:
            while not claiming.done():
                await asyncio.wait({claiming, leaving}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done() and not claiming.done():
                    return None
                if stream and not claiming.done():
                    await out.say("waiting for the first request with this Idempotency-Key")
                    patience = self._settings.waking_comment_interval
            found = await claiming
        finally:
            claiming.cancel()
            leaving.cancel()
        if found is None:
            raise IdempotencyKeyReused()
        return found


class _Late:
    """A `send` whose headers may have gone out already, for a comment."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self.begun:
                return
            self.begun = True
        await self._send(message)

    async def say(self, text: str) -> None:
        await self({"type": "http.response.start", "status": 200, "headers": list(EVENT_STREAM)})
        await self({"type": "http.response.body", "body": comment(text), "more_body": True})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _replay(answer: Answer, send: Send) -> None:
    headers = [(k.encode(), v.encode()) for k, v in answer.headers.items()] + [(REPLAYED.encode(), b"true")]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


async def _produce(claim: Claim, send: Send, produce: Produce) -> None:
    status, headers, parts = 200, dict[str, str](), list[bytes]()

    async def tee(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {k.decode(): v.decode() for k, v in message["headers"] if k not in (b"x-request-id", b"content-length")}
        else:
            parts.append(message.get("body", b""))
        await send(message)

    good = False
    try:
        async with claim.renewed():
            good = await produce(tee)
    finally:
        body = b"".join(parts)
        answer = Answer(status=status, headers=headers, body=body)
        # Shielded: a gateway that is being stopped still says how its request ended.
        await asyncio.shield(_settle(claim, answer if good and len(body) <= MAX_ANSWER_BYTES else None))


async def _settle(claim: Claim, answer: Answer | None) -> None:
    try:
        await (claim.drop() if answer is None else claim.keep(answer))
    except (NatsError, TimeoutError) as e:
        log.warning("the end of a request with an idempotency key could not be stored", extra={"error": repr(e)})
