"""The connection between the hosts of two ranks: lines of JSON, after a proof of the secret.

    head    {"nonce": …}
    member  {"index": 1, "nonce": …, "proof": …}
    head    {"proof": …, "port": 29501}
    head    {"event": "ready"}      its engine answers requests
    head    {"event": "closing"}    it stops: the end of the connection is no failure

A host that ends without "closing" ends the group (ADR 0090).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from typing import Any

from shared.contracts.stages import Stage
from shared.engines.secret_proof import NONCE_BYTES, Role, prove_secret

HANDSHAKE_S = 5.0
"""Seconds that a peer has for its part of the handshake."""
LINE_BYTES = 4096
READY = "ready"
CLOSING = "closing"


class NotProven(Exception):
    """The other side does not know the group's secret, or is no rank of it."""


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def prove_rank(role: Role, stage: Stage, index: int, nonces: tuple[bytes, bytes]) -> str:
    """Return a proof for the connection of the member `index`."""
    return prove_secret(role, stage.secret, (stage.group_id, stage.count, "rank", index), nonces).hex()


def is_proven(proof: object, role: Role, stage: Stage, index: int, nonces: tuple[bytes, bytes]) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(), prove_rank(role, stage, index, nonces).encode())


async def read_line(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read a message.

    Raises:
        NotProven: It is no message.
        EOFError: The other side has closed the connection.
    """
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as e:
        raise EOFError("the other side has closed the connection") from e
    except asyncio.LimitOverrunError as e:
        raise NotProven("a line is too long") from e
    try:
        found = json.loads(line)
    except ValueError as e:
        raise NotProven("a line is no JSON") from e
    if not isinstance(found, dict):
        raise NotProven("a line is no message")
    return found


def write_line(writer: asyncio.StreamWriter, **message: object) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


def nonce_of(message: dict[str, Any]) -> bytes:
    """Raises `NotProven` if the message has no nonce."""
    try:
        nonce = bytes.fromhex(message["nonce"])
    except (KeyError, TypeError, ValueError) as e:
        raise NotProven("a line has no nonce") from e
    if len(nonce) != NONCE_BYTES:
        raise NotProven("a nonce has the wrong length")
    return nonce
