"""The routes below /ui: the page, its session, its event stream, and the APIs for a session.

A session is a cookie that scripts cannot read. It counts below /ui only; requests that change
something need the header `X-Thaw-Console` too, which no form and no page of another site can send.
See docs/adr/0071.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.adapters.console_secret import ConsoleSecret
from services.gateway.adapters.ended_sessions import EndedSessions
from services.gateway.authorization import acting_as, hash_key, session_key_hash
from services.gateway.domain.caller import Caller
from services.gateway.domain.console_session import SESSION_S, Session, sign_session, verify_session
from services.gateway.domain.login_limit import LoginLimit
from services.gateway.http.console.assets import PAGE, SECURITY_HEADERS, Assets
from services.gateway.http.console.feed import Feed, Subscription
from services.gateway.http.console.sources import ClusterSource, RequestSource
from services.gateway.http.errors import json_response
from services.gateway.http.parsing.body import read_body
from services.gateway.http.parsing.validation import validate_body
from services.gateway.loop import Gateway
from shared.contracts.base import Frozen
from shared.errors import AuthenticationFailed, InvalidRequest, PermissionDenied, RateLimitExceeded, ThawError
from shared.telemetry.logs import LogRateLimit

log = logging.getLogger(__name__)
ROOT = "/ui"
_API = f"{ROOT}/api"
COOKIE = "thaw_console"
HEADER = "x-thaw-console"
_MAX_LOGIN_BYTES = 4096
_READING = frozenset({"GET", "HEAD"})
_ADMIN, _INFERENCE = "/admin/v1/cluster", "/v1/chat/completions"
"""Paths whose access shows the rights of a session."""


class Login(Frozen):
    """The body of a login."""

    key: str = Field(min_length=1, max_length=1024)


class Console:
    """The ASGI application below /ui.

    Args:
        api: The gateway's other routes, inside their checks of access.
    """

    def __init__(self, gateway: Gateway, api: ASGIApp) -> None:
        self._gateway = gateway
        self._api = api
        self._assets = Assets()
        self._secret = ConsoleSecret(gateway.mesh)
        self._ended = EndedSessions(gateway.mesh)
        self._logins = LoginLimit()
        self._refusals = LogRateLimit()
        self._feeds = {
            "cluster": Feed("cluster", ClusterSource(gateway).read),
            "requests": Feed("requests", RequestSource(gateway).read),
        }
        self._router = Router(
            [
                Route(ROOT, self.page, methods=["GET"]),
                Route(f"{ROOT}/", self.redirect, methods=["GET"]),
                Route(f"{ROOT}/assets/{{name}}", self.asset, methods=["GET"]),
                Route(f"{ROOT}/session", self.session, methods=["GET"]),
                Route(f"{ROOT}/login", self.login, methods=["POST"]),
                Route(f"{ROOT}/logout", self.logout, methods=["POST"]),
                Route(f"{ROOT}/events", self.events, methods=["GET"]),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["method"] not in _READING:
            _check_same_origin(headers)
        with acting_as(await self._key_hash(headers)):
            if scope["path"].startswith(f"{_API}/"):
                path, raw = scope["path"].removeprefix(_API), scope.get("raw_path") or scope["path"].encode()
                await self._api({**scope, "path": path, "raw_path": raw.removeprefix(_API.encode())}, receive, send)
            else:
                scope["app"] = self._router
                await self._router(scope, receive, send)

    async def page(self, request: Request) -> Response:
        return self._assets.respond(PAGE, request.headers)

    async def redirect(self, request: Request) -> Response:
        return RedirectResponse(ROOT)

    async def asset(self, request: Request) -> Response:
        return self._assets.respond(request.path_params["name"], request.headers)

    async def session(self, request: Request) -> Response:
        """Report what the session may do; the page asks for a key if it is too little."""
        await self._gateway.readiness.wait_for_state("/admin/")
        viewer = self._caller("GET", _ADMIN)
        document: dict[str, Any] = {
            "view": viewer is not None,
            "change": viewer is not None and viewer.scope == "admin",
            "inference": self._caller("POST", _INFERENCE) is not None,
            "key": self._has_valid_key(),
            "guarded": self._gateway.authorizer.guards_admin,
        }
        if viewer is not None and (jaeger := self._gateway.settings.jaeger_url):
            document["jaeger"] = jaeger
        return json_response(document, headers={"cache-control": "no-store", **SECURITY_HEADERS})

    async def login(self, request: Request) -> Response:
        """Exchange an API key for a session cookie."""
        await self._gateway.readiness.wait_for_state("/admin/")
        body = validate_body(Login, await read_body(request.scope, request.receive, _MAX_LOGIN_BYTES))
        key_hash = hash_key(body.key.strip())
        self._check_login(key_hash, request.client.host if request.client else "")
        session = Session(key_hash, int(time.time()) + SESSION_S, secrets.token_hex(16))
        return _with_cookie(request, sign_session(await self._secret.read(), session), SESSION_S)

    def _check_login(self, key_hash: str, address: str) -> None:
        """Check the key of a login, unless too many have failed.

        Logins at the same time count one after the other: nothing here waits.

        Raises:
            AuthenticationFailed: The key is not valid.
            RateLimitExceeded: Too many logins have failed.
        """
        now = time.monotonic()
        if wait_s := self._logins.wait_s(address, now):
            if self._refusals.allows("logins"):
                log.warning("logins at the console are refused: too many have failed", extra={"client": address})
            error = RateLimitExceeded(
                f"Too many logins have failed. Log in again in {math.ceil(wait_s)} s", retry_after_ms=math.ceil(wait_s * 1000)
            )
            error.limit = "logins"
            raise error
        try:
            if self._gateway.authorizer.find_caller(key_hash) is None:
                raise AuthenticationFailed("This API key is not valid. Enter an admin, read-only or inference key")
        except AuthenticationFailed:
            self._logins.on_failure(address, now)
            raise

    async def logout(self, request: Request) -> Response:
        """End the session, also for copies of its cookie and on other gateways."""
        if (session := await self._session(request.headers)) is not None:
            await self._ended.end(session)
        return _with_cookie(request, "", 0)

    async def events(self, request: Request) -> Response:
        """Stream the views that `?topics=` names, and their changes."""
        await self._gateway.readiness.wait_for_state("/admin/")
        self._gateway.authorizer.check("GET", _ADMIN, {})
        topics = request.query_params.get("topics", "cluster").split(",")
        feeds = [self._feeds[topic] for topic in dict.fromkeys(topics) if topic in self._feeds]
        if not feeds:
            raise InvalidRequest(f"'topics' must name some of {', '.join(self._feeds)}", param="topics")
        for feed in feeds:
            feed.require_room()

        async def stream() -> AsyncIterator[bytes]:
            page = Subscription()
            with contextlib.ExitStack() as subscriptions:
                for feed in feeds:
                    subscriptions.enter_context(feed.subscribed(page))
                async with contextlib.aclosing(page.events(self._gateway.closing)) as events:
                    async for event in events:
                        if self._caller("GET", _ADMIN) is None:  # the key has been revoked
                            return
                        if session_key_hash.get() and not await self._key_hash(request.headers):  # the session has ended
                            return
                        yield event

        headers = {"cache-control": "no-store", "x-accel-buffering": "no", **SECURITY_HEADERS}
        return StreamingResponse(stream(), headers=headers, media_type="text/event-stream")

    def _caller(self, method: str, path: str) -> Caller | None:
        """Return the session's caller of a path; None if it may not use the path."""
        try:
            return self._gateway.authorizer.check(method, path, {})
        except ThawError:
            return None

    def _has_valid_key(self) -> bool:
        """True if the session's key exists and has not expired."""
        try:
            return self._gateway.authorizer.find_caller(session_key_hash.get() or "") is not None
        except AuthenticationFailed:
            return False

    async def _key_hash(self, headers: Headers) -> str:
        """Return the digest of the session's key; empty without a valid session."""
        session = await self._session(headers)
        return session.key_hash if session is not None else ""

    async def _session(self, headers: Headers) -> Session | None:
        """Return the session of a request: the first of its cookies that is valid."""
        for value in _read_cookies(headers.get("cookie", "")):
            session = verify_session(await self._secret.read(), value, time.time())
            if session is not None and not await self._ended.has_ended(session):
                return session
        return None


def _read_cookies(header: str) -> Iterator[str]:
    """Yield the values of this console's cookies.

    Cookies of other programs on this host may have any form: `http.cookies` reads none after them.
    """
    for part in header.split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE and value:
            yield value


def _check_same_origin(headers: Headers) -> None:
    """Refuse a change that a page of another site may have sent. Raises `PermissionDenied`."""
    origin = headers.get("origin", "")
    if (
        HEADER not in headers
        or (origin and urlsplit(origin).netloc.lower() != headers.get("host", "").lower())
        or headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")
    ):
        raise PermissionDenied("Only the console's own page may send this request. For programs there are /v1 and /admin/v1")


def _with_cookie(request: Request, value: str, max_age_s: int) -> Response:
    response = json_response({}, headers={"cache-control": "no-store"})
    response.set_cookie(
        COOKIE,
        value,
        max_age=max_age_s,
        path=ROOT,
        # Behind a proxy that terminates TLS the request is plain HTTP; the page's origin is not.
        secure="https" in (request.url.scheme, urlsplit(request.headers.get("origin", "")).scheme),
        httponly=True,
        samesite="strict",
    )
    return response
