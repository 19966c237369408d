"""Bodies of requests that exceed a NATS message: their gateway holds them, and hosts read them.

The gateway sends `InferRequest` with `held`, and answers `ReadBodyPart` until the request ends. A
reply is a `BodyPart` as one line of JSON, followed by the bytes themselves: base64 would add a
third to every message. A `Failure` is a line without bytes.

`InferRequest.body` is then the outline of a JSON body: markers (`HeldBody.marker_of`) stand for the
pieces that were cut out. A piece is part of a JSON text in its encoded form, so that a host puts
its bytes in place of the marker, and never parses them. Of a form there is no outline: the whole
body is sent to the engine as it is.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from shared.contracts.base import Frozen, Message, Request

BODY_PART_BYTES = 1024 * 1024
"""Bytes that a host asks for at once; fewer if a NATS message is smaller."""
BODY_PART_HEAD_BYTES = 1024
"""Upper bound of a reply without its bytes."""


class HeldPiece(Frozen):
    """Bytes of the body that a marker stands for."""

    offset: int = Field(ge=0)
    size_bytes: int = Field(gt=0)


class HeldBody(Frozen):
    """A body that a gateway holds."""

    gateway_id: str
    body_id: str = Field(description="Random: only the engine that serves the request is given it.")
    size_bytes: int = Field(gt=0)
    marker: str = Field(
        default="", pattern="^[a-z0-9]*$", description="Random beginning of the markers; empty: the body has no outline."
    )
    pieces: tuple[HeldPiece, ...] = Field(default=(), description="By their number in the markers.")

    def marker_of(self, number: int) -> str:
        """Return the text that stands for a piece in the outline."""
        return f"{self.marker}p{number}p"

    def split(self, outline: bytes) -> list[bytes | HeldPiece]:
        """Divide the outline at its markers, and return the piece for each."""
        found = re.split(rb"%bp([0-9]{1,6})p" % self.marker.encode(), outline)
        return [part if i % 2 == 0 else self.pieces[int(part)] for i, part in enumerate(found)]


class ReadBodyPart(Request):
    """Read a part of a body.

    The request fails with `BodyLost` if the gateway does not hold the body (any more).
    """

    kind: Literal["read_body_part"] = "read_body_part"
    body_id: str
    offset: int = Field(ge=0)
    limit: int = Field(default=BODY_PART_BYTES, gt=0, description="Bytes at most.")


class BodyPart(Message):
    """The head of a reply; as many bytes follow its line feed as `size_bytes` says."""

    kind: Literal["body_part"] = "body_part"
    offset: int
    size_bytes: int
