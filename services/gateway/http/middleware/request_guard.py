"""Which requests are taken at all: those of web pages that would drive a local mesh are refused, and what may be read without a key is set.

A gateway on loopback is open to every program of the machine, browsers included. A page of another site can send requests there: under a
name of its own (DNS rebinding; the Host header tells), or without asking first (a form or plain text; the Origin header and the content
type tell).
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from services.gateway.authorization import Keys, hash_key
from services.gateway.http.parsing.multipart import is_form
from services.gateway.settings import Exposure, GatewaySettings
from shared.errors import AuthenticationFailed, NotFound, PermissionDenied, UnsupportedMediaType

_CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})


def is_local_name(host: str) -> bool:
    """Whether a Host header's name can only be this machine: a name that some page's owner could point here is not."""
    return host in _LOCAL or host.endswith(".localhost") or (host.startswith("127.") and host.replace(".", "").isdigit())


def listed(text: str) -> frozenset[str]:
    return frozenset(part.strip().lower() for part in text.split(",") if part.strip())


class Guard:
    """Checks a request before anything is made of it. `loopback`: the gateway listens on this machine only."""

    def __init__(self, settings: GatewaySettings, keys: Keys, *, loopback: bool) -> None:
        self._settings = settings
        self._keys = keys
        self._loopback = loopback
        self._hosts = listed(settings.allowed_hosts)
        self._origins = listed(settings.cors_origins)

    def check(self, scope: Scope) -> None:
        """Raise `PermissionDenied`, `UnsupportedMediaType`, `NotFound` or `AuthenticationFailed` for a request that is not taken."""
        headers, path = Headers(scope=scope), scope["path"]
        if self._loopback or self._hosts:
            self._check_host(headers)
        if self._loopback and scope["method"] in _CHANGING:
            self._check_origin(headers)
            self._check_kind(headers)
        if path == "/metrics":
            self._check_exposure(self._settings.metrics_access, path, headers)
        elif path == "/openapi.json":
            self._check_exposure(self._settings.openapi_access, path, headers)

    def _check_host(self, headers: Headers) -> None:
        host = _name_of(headers.get("host", ""))
        if not host or "*" in self._hosts or host in self._hosts or (self._loopback and is_local_name(host)):
            return
        raise PermissionDenied(f"This gateway is not known as {host[:200]!r}. Name the host in THAW_ALLOWED_HOSTS if it should be")

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin", "").lower()
        if not origin or "*" in self._origins or origin in self._origins:
            return
        if origin.partition("://")[2] == headers.get("host", "").lower():
            return
        raise PermissionDenied(
            f"Pages of {origin[:200]!r} may not use this gateway. List the origin in THAW_CORS_ORIGINS if they should"
        )

    @staticmethod
    def _check_kind(headers: Headers) -> None:
        given = headers.get("content-type")
        if given is None:
            return
        kind = given.partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json") and not is_form(given):
            raise UnsupportedMediaType(f"The body is {kind[:100]!r}. Send JSON, with the header Content-Type: application/json")

    def _check_exposure(self, exposure: Exposure, path: str, headers: Headers) -> None:
        if exposure == "off":
            raise NotFound(f"{path} is switched off here")
        if exposure == "open" or (exposure == "auto" and self._loopback):
            return
        admin = self._settings.admin_key
        known = self._keys.configured | self._keys.store.hashes("inference") | self._keys.store.hashes("admin")
        if Keys.of(headers) not in known | ({hash_key(admin.get_secret_value())} if admin is not None else set()):
            raise AuthenticationFailed(f"{path} needs a key beyond loopback: Authorization: Bearer <key>, or another setting")


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return host
