"""Proofs that both sides of a connection between engines know a secret (ADR 0067)."""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

Role = Literal["caller", "listener"]
NONCE_BYTES = 32
PROOF_BYTES = 32


def prove_secret(role: Role, secret: str, names: tuple[object, ...], nonces: tuple[bytes, bytes]) -> bytes:
    """Return the proof that one side of a connection knows a secret: an HMAC-SHA256.

    Args:
        role: The side that proves it.
        secret: The key.
        names: What the proof is for.
        nonces: The listener's and the caller's.
    """
    named = "".join(f"{part}\0" for part in (role, *names)).encode()
    return hmac.new(secret.encode(), named + nonces[0] + nonces[1], hashlib.sha256).digest()
