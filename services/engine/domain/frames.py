"""Frames on a TCP connection between two engines (ADR 0067).

A frame is

    offset  bytes
    0       2      the protocol: "TS" between stages of a group, "TK" for keys and values
    2       1      version
    3       1      0
    4       4      length of the message, big-endian
    8       4      length of the data, big-endian
    12             the message, as JSON
                   the data: bytes in the byte order of the host

Both lengths are checked before a byte of memory is taken for them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from shared.contracts.base import Message

M = TypeVar("M", bound=Message)
VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20
_HEADER = struct.Struct(">2sBBII")
HEADER_BYTES = _HEADER.size


class ProtocolError(Exception):
    """The other side sent something that is no frame of this protocol."""


@dataclass(frozen=True)
class Protocol(Generic[M]):
    """The format of one kind of connections.

    Attributes:
        magic: The first two bytes of each frame.
        name: In messages of errors.
        messages: The messages of its frames.
    """

    magic: bytes
    name: str
    messages: TypeAdapter[M]


@dataclass(frozen=True)
class FrameLengths:
    """Bytes of a frame's message and data, within the bounds."""

    message: int
    data: int


def encode_head(protocol: Protocol[M], message: M, data_bytes: int) -> bytes:
    """Return a frame without its data.

    Raises:
        ProtocolError: The message is too long for a frame.
    """
    body = message.model_dump_json().encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"A message of {len(body)} bytes is longer than {MAX_MESSAGE_BYTES}")
    return _HEADER.pack(protocol.magic, VERSION, 0, len(body), data_bytes) + body


def decode_header(protocol: Protocol[M], header: bytes, max_data_bytes: int) -> FrameLengths:
    """Return the lengths in a frame's header.

    Args:
        protocol: That the connection carries.
        header: `HEADER_BYTES` bytes.
        max_data_bytes: Most bytes of data that the receiver expects.

    Raises:
        ProtocolError: It is no header, or a length is out of bounds.
    """
    magic, version, reserved, message, data = _HEADER.unpack(header)
    if magic != protocol.magic or reserved:
        raise ProtocolError(f"The connection does not carry {protocol.name} frames")
    if version != VERSION:
        raise ProtocolError(f"The frame has version {version}, not {VERSION}. The engines need one version of Thaw")
    if not 0 < message <= MAX_MESSAGE_BYTES:
        raise ProtocolError(f"A message of {message} bytes is out of bounds (1 to {MAX_MESSAGE_BYTES})")
    if data > max_data_bytes:
        raise ProtocolError(f"{data} bytes of data are out of bounds (at most {max_data_bytes})")
    return FrameLengths(message, data)


def decode_message(protocol: Protocol[M], body: bytes) -> M:
    """Decode a message. Raises `ProtocolError` if `body` is no message of the protocol."""
    try:
        return protocol.messages.validate_json(body)
    except ValidationError as e:
        raise ProtocolError(f"A frame's message is invalid: {e.error_count()} errors, the first at {e.errors()[0]['loc']}") from e
