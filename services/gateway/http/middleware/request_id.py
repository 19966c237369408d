"""Request ids: the gateway assigns one to every request."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.telemetry.logs import request_id as log_request_id

_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")


def new_request_id() -> str:
    """Generate a request id."""
    return f"req_{uuid.uuid4().hex}"


class RequestIds:
    """Add an `x-request-id` to every response; traces and commands use it.

    A client's own id (`x-client-request-id`, or `x-request-id` as proxies send it) is returned as
    `x-client-request-id` and recorded in the span and the trace. Nothing is looked up by it, so
    that one client cannot take another's id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client_value = headers.get("x-client-request-id") or headers.get("x-request-id", "")
        client_id = client_value if _SAFE_ID.fullmatch(client_value) else None
        request_id = new_request_id()
        scope["thaw.request_id"], scope["thaw.client_request_id"] = request_id, client_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                response_headers = MutableHeaders(scope=message)
                response_headers["x-request-id"] = request_id
                if client_id is not None:
                    response_headers["x-client-request-id"] = client_id
            await send(message)

        token = log_request_id.set(request_id)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            log_request_id.reset(token)
