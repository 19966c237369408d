"""API keys: only their SHA-256 hashes are known here; admin keys and inference keys are separate."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from services.gateway.adapters.keystore import KeyStore
from services.gateway.settings import GatewaySettings
from shared.errors import AuthenticationFailed

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
    """Says who may do what: `/v1` needs an inference key as soon as there is any (or `required`), `/admin` an admin key as soon as there
    is any."""

    def __init__(self, settings: GatewaySettings, store: KeyStore) -> None:
        self._admin = frozenset({hash_key(settings.admin_key.get_secret_value())} if settings.admin_key else ())
        listed = settings.api_keys.get_secret_value() if settings.api_keys else ""
        self._listed = frozenset(h.strip().lower() for h in listed.split(",") if h.strip())
        self._file = KeyFile(settings.api_keys_file) if settings.api_keys_file else None
        self.required = settings.require_key or self._file is not None
        self.store = store

    @property
    def configured(self) -> frozenset[str]:
        """Hashes of the inference keys that the settings name."""
        return self._listed | (self._file.hashes() if self._file else frozenset())

    @property
    def guards_admin(self) -> bool:
        """Whether the admin API asks for a key."""
        return bool(self._admin | self.store.hashes("admin"))

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raise `AuthenticationFailed` unless the headers' key opens `path`."""
        if path.startswith("/admin/"):
            known = self._admin | self.store.hashes("admin")
            if known and self.of(headers) not in known:
                raise AuthenticationFailed("The admin API needs its key: Authorization: Bearer <THAW_ADMIN_KEY>")
        elif path.startswith("/v1/"):
            known = self.configured | self.store.hashes("inference")
            if (known or self.required) and self.of(headers) not in known:
                raise AuthenticationFailed("Incorrect API key provided, or none: Authorization: Bearer <key>")

    @staticmethod
    def of(headers: Mapping[str, str]) -> str:
        """The hash of the key in `Authorization: Bearer`, or in `x-api-key`, as Anthropic's clients send it; empty without one."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
        return hash_key(given) if given else ""
