"""The outer layers: request ids, keys, and every error in one shape."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.domain.admission import Reservation
from services.gateway.http.dialects import dialect_of
from services.gateway.http.errors import RequestTimeout, error_response, from_http
from services.gateway.http.guard import Guard
from services.gateway.service import Gateway
from shared.errors import InvalidRequest, PayloadTooLarge, ShuttingDown, ThawError
from shared.telemetry.logs import request_id as log_request_id

log = logging.getLogger(__name__)
_DISCARDED_BYTES = 256 * 1024 * 1024
_BODY_TIMEOUT_S = 120.0
_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


class RequestIds:
    """The outermost layer: every answer has an `x-request-id` of the gateway's making, by which traces, moves and explanations name it.

    A client's own id (`x-client-request-id`, or `x-request-id` as proxies send it) names nothing here, so that nobody can take another
    request's: it is sent back as `x-client-request-id` and noted in the request's span and record.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-client-request-id") or headers.get("x-request-id", "")
        client_id = given if _SAFE_ID.fullmatch(given) else None
        request_id = new_request_id()
        scope["thaw.request_id"], scope["thaw.client_request_id"] = request_id, client_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = request_id
                if client_id is not None:
                    answered["x-client-request-id"] = client_id
            await send(message)

        token = log_request_id.set(request_id)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            log_request_id.reset(token)


class Edge:
    """Wraps the router. Handlers raise; nothing they raise reaches the server."""

    def __init__(self, app: ASGIApp, gateway: Gateway, guard: Guard) -> None:
        self._app = app
        self._gateway = gateway
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"] = self._app  # so that the router raises what it refuses, instead of answering in plain text
        begun, dialect = False, dialect_of(scope["path"])

        async def send_noted(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            self._guard.check(scope)
            await self._gateway.require_knowledge(scope["path"])
            self._gateway.keys.check(scope["path"], Headers(scope=scope))
            await self._app(scope, receive, send_noted)
        except (ThawError, HTTPException) as e:
            if begun:
                log.error("an error came after the answer had begun", extra={"error": str(e), "path": scope["path"]})
                raise
            error = e if isinstance(e, ThawError) else from_http(e, scope["method"], scope["path"])
            await error_response(error, dialect)(scope, receive, send_noted)
        except asyncio.CancelledError:  # the server's own end came before the handler's
            if not begun:
                await error_response(ShuttingDown(), dialect)(scope, receive, send_noted)
            raise
        except Exception as e:  # the process boundary: a bug is an answer too, and is logged
            log.exception("a handler failed", extra={"path": scope["path"]})
            if not begun:
                fault = ThawError(f"{type(e).__name__}: the gateway has a fault")
                await error_response(fault, dialect)(scope, receive, send_noted)


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
