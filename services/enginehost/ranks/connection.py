"""The connection between the hosts of two ranks: lines of JSON, after a proof of the secret.

    head    {"nonce": …}
    member  {"index": 1, "nonce": …, "proof": …}
    head    {"proof": …, "port": 29501}
    head    {"event": "ready"}      the group's engine answers requests
    head    {"event": "closing"}    the head stops: the end of the connection is no failure

The head is the host of rank 0, and the other ranks are members. A host that ends without "closing"
ends the group (ADR 0090).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Container
from typing import Any

from shared.contracts.stages import Stage
from shared.engines.secret_proof import NONCE_BYTES, Role, prove_secret

_HANDSHAKE_S = 5.0
"""Seconds that both sides have for the handshake."""
LINE_BYTES = 4096
"""Longest line in bytes."""
READY = "ready"
CLOSING = "closing"


class NotProven(Exception):
    """The other side does not know the group's secret, or is no rank of it."""


async def accept_member(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stage: Stage, port: int, members: Container[int]
) -> int:
    """Complete the handshake with a member as the head; return the member's rank.

    Args:
        reader: From the member.
        writer: To the member.
        stage: The head's place in its group.
        port: The port at which the engines meet, which the member is sent.
        members: Ranks that have connected.

    Raises:
        NotProven: The member does not know the secret, or its rank is taken.
        OSError: The connection is broken. Raises `EOFError` and `TimeoutError`, too.
    """
    async with asyncio.timeout(_HANDSHAKE_S):
        nonce = secrets.token_bytes(NONCE_BYTES)
        write_line(writer, nonce=nonce.hex())
        answer = await read_line(reader)
        index, nonces = answer.get("index"), (nonce, _nonce_of(answer))
        if not isinstance(index, int) or not 0 < index < stage.count or index in members:
            raise NotProven(f"there is no free rank {index}")
        if not _is_proven(answer.get("proof"), "caller", stage, index, nonces):
            raise NotProven("wrong proof")
        write_line(writer, proof=_prove_rank("listener", stage, index, nonces), port=port)
        return index


async def meet_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stage: Stage) -> int:
    """Complete the handshake with the head as a member; return the port at which the engines meet.

    Args:
        reader: From the head.
        writer: To the head.
        stage: The member's place in its group.

    Raises:
        NotProven: The head does not know the secret.
        OSError: The connection is broken. Raises `EOFError` and `TimeoutError`, too.
    """
    async with asyncio.timeout(_HANDSHAKE_S):
        nonces = _nonce_of(await read_line(reader)), secrets.token_bytes(NONCE_BYTES)
        write_line(writer, index=stage.index, nonce=nonces[1].hex(), proof=_prove_rank("caller", stage, stage.index, nonces))
        answer = await read_line(reader)
        if not _is_proven(answer.get("proof"), "listener", stage, stage.index, nonces):
            raise NotProven("wrong proof")
        port = answer.get("port")
        if not isinstance(port, int) or not 0 < port < 65536:
            raise NotProven("no port")
        return port


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


def _prove_rank(role: Role, stage: Stage, index: int, nonces: tuple[bytes, bytes]) -> str:
    """Return a proof for the connection of the member `index`."""
    return prove_secret(role, stage.secret, (stage.group_id, stage.count, "rank", index), nonces).hex()


def _is_proven(proof: object, role: Role, stage: Stage, index: int, nonces: tuple[bytes, bytes]) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(), _prove_rank(role, stage, index, nonces).encode())


def _nonce_of(message: dict[str, Any]) -> bytes:
    """Raises `NotProven` if the message has no nonce."""
    try:
        nonce = bytes.fromhex(message["nonce"])
    except (KeyError, TypeError, ValueError) as e:
        raise NotProven("a line has no nonce") from e
    if len(nonce) != NONCE_BYTES:
        raise NotProven("a nonce has the wrong length")
    return nonce
