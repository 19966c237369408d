"""Access checks, and the conversion of every exception to an HTTP response."""

from __future__ import annotations

import asyncio
import logging

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.http.error_formats import dialect_of
from services.gateway.http.errors import error_response, from_http
from services.gateway.http.middleware.request_guard import Guard
from services.gateway.loop import Gateway
from shared.errors import ShuttingDown, ThawError

log = logging.getLogger(__name__)


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
