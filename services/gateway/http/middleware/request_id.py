"""Request ids: the gateway assigns one to every request."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.telemetry.logs import request_id as log_request_id

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
