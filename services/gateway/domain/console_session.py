"""Sessions of the console: signed values that name an API key by its digest.

A value grants nothing by itself. Each request looks up the digest among the valid keys, so a
revoked key ends its sessions.
"""

from __future__ import annotations

import hashlib
import hmac
import re

SESSION_S = 12 * 3600
"""Seconds from the login until the key has to be entered again."""
_FORM = re.compile(r"v1\.([0-9a-f]{64})\.([0-9]{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})")


def sign_session(secret: bytes, key_hash: str, expires: int, nonce: str) -> str:
    """Build the value of a session's cookie.

    Args:
        secret: Shared by the gateways of the mesh.
        key_hash: SHA-256 of the API key, in hexadecimal.
        expires: Unix seconds.
        nonce: 32 random hexadecimal digits: no two sessions have the same value.
    """
    payload = f"v1.{key_hash}.{expires}.{nonce}"
    return f"{payload}.{_signature(secret, payload)}"


def verify_session(secret: bytes, value: str, now: float) -> str | None:
    """Return the key's hash of a valid session; None for a forged, damaged or expired value."""
    found = _FORM.fullmatch(value)
    if found is None:
        return None
    key_hash, expires, _, signature = found.groups()
    expected = _signature(secret, value.rpartition(".")[0])
    if not hmac.compare_digest(signature, expected) or int(expires) <= now:
        return None
    return key_hash


def _signature(secret: bytes, payload: str) -> str:
    return hmac.new(secret, payload.encode(), hashlib.sha256).hexdigest()
