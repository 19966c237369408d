"""Protection against requests of web pages, and of monitoring routes.

A gateway on loopback is open to every program of the machine, browsers included. A page of another
site can send requests to it in two ways: under a name of its own (DNS rebinding; the Host header
shows it), or without a preflight (a form or plain text; the Origin header and the content type
show it).
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from services.gateway.authorization import Authorizer
from services.gateway.http.parsing.multipart import is_form
from services.gateway.settings import Exposure, GatewaySettings
from shared.errors import AuthenticationFailed, NotFound, PermissionDenied, UnsupportedMediaType

_CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_NEIGHBOUR = re.compile(r"[a-z0-9_-]+")
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})


def is_local_name(host: str) -> bool:
    """True if a name in a Host header always means this machine, whatever DNS says."""
    return host in _LOCAL or host.endswith(".localhost") or (host.startswith("127.") and host.replace(".", "").isdigit())


def parse_list(text: str) -> frozenset[str]:
    """Split a comma-separated setting into lower-case names."""
    return frozenset(part.strip().lower() for part in text.split(",") if part.strip())


class RequestGuard:
    """Check the headers of a request before its body is read."""

    def __init__(self, settings: GatewaySettings, authorizer: Authorizer, *, is_loopback: bool) -> None:
        """Create a guard.

        Args:
            settings: The gateway's settings.
            authorizer: Checks API keys.
            is_loopback: True if only this machine can reach the gateway.
        """
        self._settings = settings
        self._authorizer = authorizer
        self._is_loopback = is_loopback
        self._hosts = parse_list(settings.allowed_hosts)
        # Containers of the same network use a name without a dot, which no public DNS resolves.
        self._has_neighbours = bool(settings.published_address)
        self._origins = parse_list(settings.cors_origins)

    def check(self, scope: Scope) -> None:
        """Check one request.

        Raises:
            PermissionDenied: A web page of another site may have sent it.
            UnsupportedMediaType: The body is not JSON or a form.
            NotFound: The route is disabled.
            AuthenticationFailed: The route needs a key.
        """
        headers, path = Headers(scope=scope), scope["path"]
        if self._is_loopback or self._hosts:
            self._check_host(headers)
        if self._is_loopback and scope["method"] in _CHANGING:
            self._check_origin(headers)
            self._check_kind(headers)
        if path == "/metrics":
            self._check_exposure(self._settings.metrics_access, path, headers)
        elif path == "/openapi.json":
            self._check_exposure(self._settings.openapi_access, path, headers)

    def _check_host(self, headers: Headers) -> None:
        host = _name_of(headers.get("host", ""))
        if not host or "*" in self._hosts or host in self._hosts:
            return
        if self._is_loopback and (is_local_name(host) or (self._has_neighbours and _NEIGHBOUR.fullmatch(host))):
            return
        raise PermissionDenied(f"The Host {host[:200]!r} is not allowed. Add it to THAW_ALLOWED_HOSTS if it should be")

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin", "").lower()
        if not origin or "*" in self._origins or origin in self._origins:
            return
        if origin.partition("://")[2] == headers.get("host", "").lower():
            return
        raise PermissionDenied(f"The origin {origin[:200]!r} is not allowed. Add it to THAW_CORS_ORIGINS if it should be")

    @staticmethod
    def _check_kind(headers: Headers) -> None:
        given = headers.get("content-type")
        if given is None:
            return
        kind = given.partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json") and not is_form(given):
            raise UnsupportedMediaType(
                f"The content type {kind[:100]!r} is not supported. Send JSON, with the header Content-Type: application/json"
            )

    def _check_exposure(self, exposure: Exposure, path: str, headers: Headers) -> None:
        if exposure == "off":
            raise NotFound(f"{path} is disabled on this gateway")
        if exposure == "open" or (exposure == "auto" and self._is_loopback):
            return
        if self._authorizer.find_caller(Authorizer.key_hash(headers)) is None:
            raise AuthenticationFailed(f"{path} needs a key. Send Authorization: Bearer <key>, or change its setting")


def _name_of(host: str) -> str:
    """Return the name in a Host header without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return host
