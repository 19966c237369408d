"""Access checks, and the conversion of every exception to an HTTP response."""

from __future__ import annotations

import asyncio
import logging

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.http.error_formats import error_format_of
from services.gateway.http.errors import error_response, from_http_exception
from services.gateway.http.middleware.request_guard import RequestGuard
from services.gateway.http.scopes import CALLER, IS_OF_BATCH
from services.gateway.loop import Gateway
from shared.errors import ShuttingDown, ThawError

log = logging.getLogger(__name__)


class ErrorBoundary:
    """Check access, call the router, and convert what it raises to a response."""

    def __init__(self, app: ASGIApp, gateway: Gateway, guard: RequestGuard) -> None:
        self._app = app
        self._gateway = gateway
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"] = self._app  # the router then raises its errors instead of answering in plain text
        has_started, error_format = False, error_format_of(scope["path"])

        async def send_tracked(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            self._guard.check(scope)
            await self._gateway.readiness.wait_for_state(scope["path"])
            scope[CALLER] = self._gateway.authorizer.check(scope["method"], scope["path"], Headers(scope=scope))
            await self._app(scope, receive, send_tracked)
        except (ThawError, HTTPException) as e:
            if has_started:
                log.error("request failed after its response had started", extra={"error": str(e), "path": scope["path"]})
                raise
            error = e if isinstance(e, ThawError) else from_http_exception(e, scope["method"], scope["path"])
            if IS_OF_BATCH not in scope:
                name = self._gateway.authorizer.key_name(Headers(scope=scope))
                self._gateway.request_log.metrics.record_rejection(error, name)
            await error_response(error, error_format)(scope, receive, send_tracked)
        except asyncio.CancelledError:  # the server stops before the handler has finished
            if not has_started:
                await error_response(ShuttingDown(), error_format)(scope, receive, send_tracked)
            raise
        except Exception as e:  # the process boundary: a bug is logged, and answered with 500
            log.exception("handler failed", extra={"path": scope["path"]})
            if not has_started:
                fault = ThawError(f"The gateway failed with {type(e).__name__}. Report this with the gateway's log")
                await error_response(fault, error_format)(scope, receive, send_tracked)
