"""Connections that carry keys and values (ADR 0084).

Frames are those of `frames`, with a `KvMessage`. A connection begins with

    listener → caller    "THAWKV01", a nonce of 32 bytes
    caller → listener    the ticket (16 bytes), a nonce of 32 bytes, HMAC-SHA256 of "caller" …
    listener → caller    HMAC-SHA256 of "listener" …

with the ticket's secret as key. Neither the secret nor anything that helps to guess it is sent.
"""

from __future__ import annotations

from services.engine.domain.frames import Protocol
from shared.contracts.kv_transfer import KV_MESSAGE, KvMessage
from shared.engines.secret_proof import Role, prove_secret

KEYS_AND_VALUES: Protocol[KvMessage] = Protocol(b"TK", "KV", KV_MESSAGE)
GREETING = b"THAWKV01"
TICKET_BYTES = 16


def prove_ticket(role: Role, ticket: str, secret: str, nonces: tuple[bytes, bytes]) -> bytes:
    """Return the proof that this side of a connection knows the ticket's secret.

    Args:
        role: The side that proves it.
        ticket: Names the permission.
        secret: Of the ticket.
        nonces: The listener's and the caller's.
    """
    return prove_secret(role, secret, (ticket,), nonces)
