"""Frames between the stages of a group, and the proofs with which a connection begins (ADR 0067).

A frame is

    offset  bytes
    0       2      "TS"
    2       1      version
    3       1      0
    4       4      length of the message, big-endian
    8       4      length of the data, big-endian
    12             the message: a `StageMessage` as JSON
                   the data: a tensor's bytes, row by row, in the byte order of the host

Both lengths are checked before a byte of memory is taken for them.

A connection begins with three records of fixed length, in which both sides prove that they know the
group's secret. No secret, and nothing that helps to guess it, is sent.

    listener → caller    "THAWST01", a nonce of 32 bytes
    caller → listener    a nonce of 32 bytes, HMAC-SHA256 of "caller" and the connection's names
    listener → caller    HMAC-SHA256 of "listener" and the same
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from shared.contracts.stages import STAGE_MESSAGE, Stage, StageMessage

MAGIC = b"TS"
VERSION = 1
GREETING = b"THAWST01"
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_MESSAGE_BYTES = 1 << 20
_HEADER = struct.Struct(">2sBBII")
HEADER_BYTES = _HEADER.size


class ProtocolError(Exception):
    """The other side sent something that is no frame of this protocol."""


@dataclass(frozen=True)
class FrameLengths:
    """Bytes of a frame's message and data, within the bounds."""

    message: int
    data: int


def encode_head(message: StageMessage, data_bytes: int) -> bytes:
    """Return a frame without its data.

    Raises:
        ProtocolError: The message is too long for a frame.
    """
    body = message.model_dump_json().encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"A message of {len(body)} bytes is longer than {MAX_MESSAGE_BYTES}")
    return _HEADER.pack(MAGIC, VERSION, 0, len(body), data_bytes) + body


def decode_header(header: bytes, max_data_bytes: int) -> FrameLengths:
    """Return the lengths in a frame's header.

    Args:
        header: `HEADER_BYTES` bytes.
        max_data_bytes: Most bytes of data that the receiver expects.

    Raises:
        ProtocolError: It is no header, or a length is out of bounds.
    """
    magic, version, reserved, message, data = _HEADER.unpack(header)
    if magic != MAGIC or reserved:
        raise ProtocolError("The connection does not carry stage frames")
    if version != VERSION:
        raise ProtocolError(f"The frame has version {version}, not {VERSION}. Stages of a group need one version of Thaw")
    if not 0 < message <= MAX_MESSAGE_BYTES:
        raise ProtocolError(f"A message of {message} bytes is out of bounds (1 to {MAX_MESSAGE_BYTES})")
    if data > max_data_bytes:
        raise ProtocolError(f"{data} bytes of data are out of bounds (at most {max_data_bytes})")
    return FrameLengths(message, data)


def decode_message(body: bytes) -> StageMessage:
    """Raises `ProtocolError` if `body` is no message."""
    try:
        return STAGE_MESSAGE.validate_json(body)
    except ValidationError as e:
        raise ProtocolError(f"A frame's message is invalid: {e.error_count()} errors, the first at {e.errors()[0]['loc']}") from e


def prove(role: Literal["caller", "listener"], stage: Stage, caller: int, nonces: tuple[bytes, bytes]) -> bytes:
    """Return the proof that this side of a connection knows the group's secret.

    Args:
        role: The side that proves it.
        stage: Any stage of the group.
        caller: Index of the stage that connects.
        nonces: The listener's and the caller's.
    """
    named = f"{role}\0{stage.group_id}\0{stage.count}\0{caller}\0{(caller + 1) % stage.count}\0".encode()
    return hmac.new(stage.secret.encode(), named + nonces[0] + nonces[1], hashlib.sha256).digest()


def is_proven(proof: bytes, role: Literal["caller", "listener"], stage: Stage, caller: int, nonces: tuple[bytes, bytes]) -> bool:
    """Check a proof, in constant time."""
    return hmac.compare_digest(proof, prove(role, stage, caller, nonces))
