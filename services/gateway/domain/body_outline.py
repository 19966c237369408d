"""Outlines of bodies that exceed a message: what the gateway has to read of them.

A body is fed in order, in parts of any size. An outline leaves out long and opaque parts: the
contents of a form's files, and base64 in JSON. Both outlines are pure.
"""

from __future__ import annotations

import string
from typing import Protocol

from shared.contracts.request_body import HeldBody, HeldPiece
from shared.errors import InvalidRequest

CELL_BYTES = 16 * 1024
"""Base64 is cut out in cells of this size, or a byte more."""
_BASE64 = (string.ascii_letters + string.digits + "+/=_-").encode()
_BACKSLASH = ord("\\")
_KEPT_BYTES = 16
"""Bytes in front of a piece that stay, because a backslash before them may belong to the first."""
_MAX_PIECES = 256
_PART_BYTES = 128 * 1024
"""Bytes of each part of a form that stay: its headers, and any field that the gateway reads."""
_MAX_PARTS = 128


class Outline(Protocol):
    """The part of a body that is kept, in `kept`; the rest is cut out while the body is fed.

    Attributes:
        marker: Beginning of the markers that stand for `pieces`; empty: there are none.
    """

    marker: str
    kept: bytearray
    pieces: list[HeldPiece]

    def feed(self, data: bytes) -> None:
        """Read more of the body."""

    def finish(self) -> None:
        """The body is complete."""


class JsonOutline:
    """A JSON text whose long base64 is replaced by markers.

    The text is divided into cells. A cell of nothing but base64 can only be the inside of a string,
    or of something that is no JSON. Escaped slashes (`\\/`), as PHP writes them, count as base64.
    Pieces of strings are cut out as they are encoded, so that they can be put back without parsing.
    """

    def __init__(self, marker: str) -> None:
        """Use markers that begin with `marker`, which the client cannot guess."""
        self.marker = marker
        self.kept = bytearray()
        self.pieces: list[HeldPiece] = []
        self._names = HeldBody(gateway_id="", body_id="", size_bytes=1, marker=marker)
        self._rest = bytearray()
        self._offset = 0
        """Position of the cell in the body."""
        self._in_piece = False

    def feed(self, data: bytes) -> None:
        self._rest += data
        at = 0
        while len(self._rest) - at > CELL_BYTES:
            end = at + CELL_BYTES
            end += self._rest[end - 1] == _BACKSLASH  # an escaped slash is not divided
            self._add(bytes(self._rest[at:end]))
            at = end
        del self._rest[:at]

    def finish(self) -> None:
        self.kept += self._rest
        self._rest.clear()

    def _add(self, cell: bytes) -> None:
        if not is_base64(cell):
            self.kept += cell
            self._in_piece = False
        elif self._in_piece:
            last = self.pieces[-1]
            self.pieces[-1] = HeldPiece(offset=last.offset, size_bytes=last.size_bytes + len(cell))
        elif len(self.pieces) < _MAX_PIECES:
            start = _KEPT_BYTES if cell[_KEPT_BYTES - 1 : _KEPT_BYTES] != b"\\" else _KEPT_BYTES + 1
            self.kept += cell[:start] + self._names.marker_of(len(self.pieces)).encode()
            self.pieces.append(HeldPiece(offset=self._offset + start, size_bytes=len(cell) - start))
            self._in_piece = True
        else:
            self.kept += cell
        self._offset += len(cell)


def is_base64(cell: bytes) -> bool:
    """True if a part of a JSON text has only base64, with slashes escaped or not."""
    others = cell.translate(None, _BASE64)
    return not others or (not others.strip(b"\\") and cell.count(b"\\/") == len(others))


class FormOutline:
    """A multipart form without the contents of its files: each part ends after some bytes."""

    marker = ""

    def __init__(self, boundary: bytes) -> None:
        self.kept = bytearray()
        self.pieces: list[HeldPiece] = []
        self._delimiter = b"\r\n--" + boundary
        self._rest = b""
        self._part_bytes = 0
        self._parts = 0

    def feed(self, data: bytes) -> None:
        """Read more of the body. Raises `InvalidRequest` if the form has too many parts."""
        data, at = self._rest + data, 0
        while (found := data.find(self._delimiter, at)) >= 0:
            self._parts += 1
            if self._parts > _MAX_PARTS:
                raise InvalidRequest(f"The multipart form has more than {_MAX_PARTS} parts. Send fewer")
            self._keep(data[at:found])
            self.kept += self._delimiter
            at = found + len(self._delimiter)
            self._part_bytes = 0
        end = max(at, len(data) - len(self._delimiter) + 1)
        self._keep(data[at:end])
        self._rest = data[end:]

    def finish(self) -> None:
        self.kept += self._rest
        self._rest = b""

    def _keep(self, data: bytes) -> None:
        self.kept += data[: max(0, _PART_BYTES - self._part_bytes)]
        self._part_bytes += len(data)
