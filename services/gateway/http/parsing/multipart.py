"""Text fields of a multipart form, read without decoding its files.

The gateway needs `model` and `stream`; the engine reads the whole form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from services.gateway.http.parsing.cooperative import TimeSlice
from shared.errors import InvalidRequest

if TYPE_CHECKING:  # the library defines it for type checkers only
    from python_multipart.multipart import MultipartCallbacks

MULTIPART = "multipart/form-data"
_MAX_FIELD_BYTES = 64 * 1024
_SLICE_BYTES = 16 * 1024
_MAX_PARTS = 128
_MAX_HEADERS = 8
_MAX_HEADER_BYTES = 4096
_MAX_TYPE_BYTES = 1024


def is_form(content_type: str) -> bool:
    """True if a Content-Type is that of a multipart form."""
    return content_type.split(";", 1)[0].strip().lower() == MULTIPART


def boundary_of(content_type: str) -> bytes:
    """Return the boundary of a form. Raises `InvalidRequest` without one."""
    boundary = parse_options_header(content_type)[1].get(b"boundary") if len(content_type) <= _MAX_TYPE_BYTES else None
    if not boundary:
        raise InvalidRequest("The Content-Type of the multipart form has no boundary. Let the HTTP client set the header")
    return boundary


async def text_fields(content_type: str, body: bytes) -> dict[str, str]:
    """Parse the fields of a form that are not files; the last of equal names counts.

    The event loop runs between slices of a large body.

    Raises:
        InvalidRequest: The body is not a form, is incomplete, or has too many or too large parts.
    """
    boundary = boundary_of(content_type)
    fields = _Fields()
    time_slice = TimeSlice()
    try:
        parser = MultipartParser(boundary, fields.callbacks(), max_header_count=_MAX_HEADERS, max_header_size=_MAX_HEADER_BYTES)
        for at in range(0, len(body), _SLICE_BYTES):
            parser.write(body[at : at + _SLICE_BYTES])
            await time_slice.pause()
    except FormParserError as e:
        raise InvalidRequest(f"The body is not a valid multipart form: {e}. Check its Content-Type") from e
    if not fields.complete:
        raise InvalidRequest("The multipart form is incomplete: its closing boundary is missing. Send the whole body")
    return fields.values


class _Fields:
    """Handler of the parser's events. The bytes of files are skipped."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.complete = False
        self._parts = 0
        self._name: bytes | None = None
        self._value = bytearray()
        self._header, self._header_value = bytearray(), bytearray()

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin_part,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_header_field": self._add_header,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise InvalidRequest(f"The multipart form has more than {_MAX_PARTS} parts. Send fewer")
        self._name = None
        self._value.clear()

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._header_value))
            is_file = b"filename" in options or b"filename*" in self._header_value.lower()
            self._name = None if is_file else options.get(b"name")
        self._header.clear()
        self._header_value.clear()

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            return
        if len(self._value) + end - start > _MAX_FIELD_BYTES:
            self._name = None  # the gateway reads no field of that size
            return
        self._value += data[start:end]

    def _end_part(self) -> None:
        if self._name is not None:
            self.values[self._name.decode(errors="replace")] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self.complete = True
