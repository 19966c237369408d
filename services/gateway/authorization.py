"""API keys: only their SHA-256 hashes are known here; admin keys and inference keys are separate."""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from services.gateway.adapters.key_store import KeyStore
from services.gateway.settings import GatewaySettings
from shared.addresses import is_loopback
from shared.errors import AuthenticationFailed, PermissionDenied

log = logging.getLogger(__name__)
_LOOK_S = 1.0


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class KeyFile:
    """One hash a line; read again when the file changes. A file that is not there holds no key."""

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()
        self._looked = 0.0
        self._stamp: tuple[int, int] | None = None
        self._hashes: frozenset[str] = frozenset()

    def hashes(self) -> frozenset[str]:
        now = time.monotonic()
        if now - self._looked >= _LOOK_S or not self._looked:
            self._looked = now
            self._refresh()
        return self._hashes

    def _refresh(self) -> None:
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            if stamp == self._stamp:
                return
            lines = self._path.read_text().splitlines()
        except OSError as e:
            log.warning("the file of API keys cannot be read; no key of it is valid", extra={"error": str(e)})
            self._stamp, self._hashes = None, frozenset()
            return
        words = (line.split("#", 1)[0].split() for line in lines)
        self._stamp, self._hashes = stamp, frozenset(w[0].lower() for w in words if w)


class Keys:
    """Says who may do what.

    `/v1` needs an inference key as soon as one exists. Without THAW_REQUIRE_KEY a key stays necessary after the last one is gone, and is
    always necessary beyond loopback. `/admin` needs an admin key as soon as one exists; without any, it is off beyond loopback.
    """

    def __init__(self, settings: GatewaySettings, store: KeyStore, *, exposed: bool) -> None:
        """`exposed`: whether other machines can reach the gateway."""
        self._admin = frozenset({hash_key(settings.admin_key.get_secret_value())} if settings.admin_key else ())
        listed = settings.api_keys.get_secret_value() if settings.api_keys else ""
        self._listed = frozenset(h.strip().lower() for h in listed.split(",") if h.strip())
        self._file = KeyFile(settings.api_keys_file) if settings.api_keys_file else None
        self._require = settings.require_key
        self.exposed = exposed
        self.store = store

    @property
    def configured(self) -> frozenset[str]:
        """Hashes of the inference keys that the settings name."""
        return self._listed | (self._file.hashes() if self._file else frozenset())

    @property
    def required(self) -> bool:
        """Whether inference needs a key though none is valid now."""
        if self._require is not None:
            return self._require or self._file is not None or self.store.has_unparsable
        return self.exposed or self._file is not None or self.store.existed("inference")

    @property
    def guards_admin(self) -> bool:
        """Whether the admin API asks for a key. Once an admin key has existed, it does for ever."""
        return bool(self._admin) or self.store.existed("admin")

    def note_configured(self) -> None:
        """Remember that the settings name inference keys."""
        if self.configured:
            self.store.note("inference")

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raise `AuthenticationFailed` unless the headers' key opens `path`, `PermissionDenied` where the admin API is off."""
        if path.startswith("/admin/"):
            self._check_admin(headers)
        elif path.startswith("/v1/"):
            known = self.configured | self.store.hashes("inference")
            if (known or self.required) and self.of(headers) not in known:
                raise AuthenticationFailed("Incorrect API key provided, or none: Authorization: Bearer <key>")

    def _check_admin(self, headers: Mapping[str, str]) -> None:
        if self.guards_admin:
            if self.of(headers) not in self._admin | self.store.hashes("admin"):
                raise AuthenticationFailed("The admin API needs its key: Authorization: Bearer <THAW_ADMIN_KEY>")
        elif self.exposed:
            raise PermissionDenied(
                "The admin API is off: this gateway is reachable beyond loopback and has no admin key. Start it with THAW_ADMIN_KEY."
            )

    @staticmethod
    def of(headers: Mapping[str, str]) -> str:
        """The hash of the key in `Authorization: Bearer`, or in `x-api-key`, as Anthropic's clients send it; empty without one."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
        return hash_key(given) if given else ""


def is_exposed(settings: GatewaySettings, listener: socket.socket) -> bool:
    """Whether other machines can reach the gateway: by the address that it is published on, or else the one it listens on."""
    if settings.published_address:
        return not is_loopback(settings.published_address)
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return not is_loopback(listener.getsockname()[0])
