"""Replies with a part of a request's body: a line of JSON, then the bytes."""

from __future__ import annotations

from pydantic import ValidationError

from shared.contracts.base import Failure
from shared.contracts.request_body import BODY_PART_HEAD_BYTES, BodyPart
from shared.errors import ThawError, from_body


def encode_body_part(offset: int, data: bytes) -> bytes:
    """Encode a part as a reply."""
    return b"%b\n%b" % (BodyPart(offset=offset, size_bytes=len(data)).model_dump_json().encode(), data)


def decode_body_part(reply: bytes, offset: int) -> bytes:
    """Return the bytes of a reply.

    Args:
        offset: The offset that was asked for.

    Raises:
        ThawError: The gateway answered with this error, or the reply is malformed.
    """
    end = reply.find(b"\n", 0, BODY_PART_HEAD_BYTES)
    try:
        if end < 0:
            raise from_body(Failure.model_validate_json(reply).error)
        part = BodyPart.model_validate_json(reply[:end])
    except ValidationError as e:
        raise ThawError("A reply with a part of a body is malformed (a newer major version?)") from e
    data = reply[end + 1 :]
    if part.offset != offset or len(data) != part.size_bytes or not data:
        raise ThawError(
            f"A reply with a part of a body has {len(data)} bytes at {part.offset}, instead of {part.size_bytes} at {offset}"
        )
    return data
