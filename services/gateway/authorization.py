"""Authorization by API keys, of which only SHA-256 hashes are stored."""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from services.gateway.adapters.key_store import KeyStore
from services.gateway.domain.caller import ADMIN, ANONYMOUS, Caller
from services.gateway.settings import GatewaySettings
from shared.addresses import is_loopback
from shared.errors import AuthenticationFailed, PermissionDenied

log = logging.getLogger(__name__)
_CHECK_INTERVAL_S = 1.0
_READING = frozenset({"GET", "HEAD"})
INFERENCE_PREFIXES = ("/v1/", "/api/")
"""Paths of OpenAI's API and of Ollama's, which need an inference key."""
ADMIN_ROUTES = ("/api/pull",)
"""Routes below these prefixes that change the cluster, and need an admin key."""
session_key_hash: ContextVar[str | None] = ContextVar("session_key_hash", default=None)
"""Digest of the key of the console's session, or of a batch; empty: a request without a key.

None for other requests, whose headers have the key.
"""


@contextmanager
def acting_as(key_hash: str) -> Iterator[None]:
    """Make the requests inside the block those of a key, whatever their headers say.

    Args:
        key_hash: Digest of the key; empty for none.
    """
    token = session_key_hash.set(key_hash)
    try:
        yield
    finally:
        session_key_hash.reset(token)


def hash_key(key: str) -> str:
    """Hash an API key as the stores keep it."""
    return hashlib.sha256(key.encode()).hexdigest()


class KeyFile:
    """A file with one hash per line; a missing file has no key.

    The file is read again when it changes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()
        self._checked_at = 0.0
        self._stamp: tuple[int, int, int] | None = None
        self._hashes: frozenset[str] = frozenset()

    def hashes(self) -> frozenset[str]:
        now = time.monotonic()
        if now - self._checked_at >= _CHECK_INTERVAL_S or not self._checked_at:
            self._checked_at = now
            self._refresh()
        return self._hashes

    def _refresh(self) -> None:
        try:
            stat = self._path.stat()
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if stamp == self._stamp:
                return
            lines = self._path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as e:
            log.warning("failed to read the file of API keys; none of its keys is valid", extra={"error": str(e)})
            self._stamp, self._hashes = None, frozenset()
            return
        words = (line.split("#", 1)[0].split() for line in lines)
        self._stamp, self._hashes = stamp, frozenset(w[0].lower() for w in words if w)


class Authorizer:
    """Decide which requests are allowed.

    `/v1` and `/api` need an inference key as soon as one exists. If THAW_REQUIRE_KEY is unset, they
    still do after the last key was removed, and always beyond loopback. `/admin` and Ollama's
    `/api/pull` need an admin key as soon as one exists; without any, they are disabled beyond
    loopback.
    """

    def __init__(self, settings: GatewaySettings, store: KeyStore, *, is_exposed: bool) -> None:
        """Read the settings.

        Args:
            settings: The gateway's settings.
            store: Keys that the admin API manages.
            is_exposed: True if other machines can reach the gateway.
        """
        self._admin = frozenset({hash_key(settings.admin_key.get_secret_value())} if settings.admin_key else ())
        listed = settings.api_keys.get_secret_value() if settings.api_keys else ""
        self._listed = frozenset(h.strip().lower() for h in listed.split(",") if h.strip())
        self._file = KeyFile(settings.api_keys_file) if settings.api_keys_file else None
        self._require = settings.require_key
        self.is_exposed = is_exposed
        self.store = store

    @property
    def configured(self) -> frozenset[str]:
        """Hashes of the inference keys in the settings."""
        return self._listed | (self._file.hashes() if self._file else frozenset())

    @property
    def required(self) -> bool:
        """True if inference needs a key though none is valid now."""
        if self._require is not None:
            return self._require or self._file is not None or self.store.has_unparsable
        return self.is_exposed or self._file is not None or self.store.has_existed("inference")

    @property
    def guards_admin(self) -> bool:
        """True if the admin API needs a key: always, once an admin key has existed."""
        return bool(self._admin) or self.store.has_existed("admin")

    def note_configured(self) -> None:
        """Record durably that inference keys have existed, if the settings have any."""
        if self.configured:
            self.store.note("inference")

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> Caller:
        """Check the API key of a request, and return who sent it.

        A route of the admin API checks in addition that the caller's scope suffices
        (`services/gateway/http/scopes.py`).

        Raises:
            AuthenticationFailed: The path needs a key, and the request has no valid one.
            PermissionDenied: The admin API is disabled, or the key's scope does not suffice.
        """
        if path.startswith("/admin/") or path in ADMIN_ROUTES:
            return self._check_admin(self.key_hash(headers))
        if path.startswith(INFERENCE_PREFIXES):
            return self._check_inference(method, self.key_hash(headers))
        return ANONYMOUS

    def find_caller(self, digest: str) -> Caller | None:
        """Return whose key has this hash: any scope, stored or configured. None: no valid key.

        Raises:
            AuthenticationFailed: The key has expired.
        """
        if not digest:
            return None
        key = self.store.find(digest)
        if key is not None:
            if key.expires is not None and key.expires <= time.time():
                raise AuthenticationFailed(f"The API key {key.name} has expired. Ask for a new one")
            return Caller(key.name, key.scope, digest, key)
        if digest in self._admin:
            return Caller("THAW_ADMIN_KEY", "admin", digest)
        if digest in self.configured:
            return Caller(_configured_name(digest), "inference", digest)
        return None

    def require_valid(self, caller: Caller) -> None:
        """Check that the key of a request that was checked before has not been revoked meanwhile.

        Raises:
            AuthenticationFailed: It has been.
        """
        if caller.key is not None and self.store.find(caller.digest) is None:
            raise AuthenticationFailed("The API key was revoked while the request was received", should_retry=False)

    def key_name(self, headers: Mapping[str, str]) -> str:
        """Return the name of a request's key, expired or not; empty if no key has its hash."""
        digest = self.key_hash(headers)
        key = self.store.find(digest) if digest else None
        if key is not None:
            return key.name
        return _configured_name(digest) if digest in self.configured else ""

    def _check_inference(self, method: str, digest: str) -> Caller:
        caller = self.find_caller(digest)
        if caller is not None and caller.scope == "inference":
            return caller
        if caller is not None and caller.scope == "read-only":
            if method in _READING:
                return caller
            raise PermissionDenied(f"The API key {caller.name} can only read. Use a key with the scope inference")
        if self.configured or self.store.hashes("inference") or self.required:
            raise AuthenticationFailed("The API key is missing or incorrect. Send Authorization: Bearer <key>")
        return ANONYMOUS

    def _check_admin(self, digest: str) -> Caller:
        caller = self.find_caller(digest)
        if caller is not None and caller.scope != "inference":
            return caller
        if self.guards_admin:
            raise AuthenticationFailed("The admin API needs an admin key. Send Authorization: Bearer <THAW_ADMIN_KEY>")
        if self.is_exposed:
            raise PermissionDenied(
                "The admin API is disabled: the gateway is reachable beyond loopback and has no admin key. Start it with THAW_ADMIN_KEY"
            )
        return ADMIN

    @staticmethod
    def key_hash(headers: Mapping[str, str]) -> str:
        """Hash the key of a request; empty if it has none.

        Clients send `Authorization: Bearer`; Anthropic's send `x-api-key`.
        """
        if (of_session := session_key_hash.get()) is not None:
            return of_session
        scheme, _, key = headers.get("authorization", "").partition(" ")
        value = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
        return hash_key(value) if value else ""


def _configured_name(digest: str) -> str:
    return f"configured-{digest[:12]}"


def is_exposed(settings: GatewaySettings, listener: socket.socket) -> bool:
    """True if other machines can reach the published or listening address."""
    if settings.published_address:
        return not is_loopback(settings.published_address)
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return not is_loopback(listener.getsockname()[0])
