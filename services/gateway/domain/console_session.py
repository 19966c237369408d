"""Sessions of the console: signed values that name an API key by its digest.

A value grants nothing by itself. Each request looks up the digest among the valid keys, so a
revoked key ends its sessions.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass

SESSION_S = 12 * 3600
"""Seconds from the login until the key has to be entered again."""
_FORM = re.compile(r"v1\.([0-9a-f]{64})\.([0-9]{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})")


@dataclass(frozen=True)
class Session:
    """What the value of a session's cookie says.

    Attributes:
        key_hash: SHA-256 of the API key, in hexadecimal.
        expires: Unix seconds.
        nonce: 32 random hexadecimal digits: no two sessions have the same value.
    """

    key_hash: str
    expires: int
    nonce: str


def sign_session(secret: bytes, session: Session) -> str:
    """Build the value of a session's cookie.

    Args:
        secret: Shared by the gateways of the mesh.
        session: What the value says.
    """
    payload = f"v1.{session.key_hash}.{session.expires}.{session.nonce}"
    return f"{payload}.{_signature(secret, payload)}"


def verify_session(secret: bytes, value: str, now: float) -> Session | None:
    """Return a session that has not expired; None for a forged, damaged or expired value."""
    found = _FORM.fullmatch(value)
    if found is None:
        return None
    key_hash, expires, nonce, signature = found.groups()
    expected = _signature(secret, value.rpartition(".")[0])
    if not hmac.compare_digest(signature, expected) or int(expires) <= now:
        return None
    return Session(key_hash, int(expires), nonce)


def _signature(secret: bytes, payload: str) -> str:
    return hmac.new(secret, payload.encode(), hashlib.sha256).hexdigest()
