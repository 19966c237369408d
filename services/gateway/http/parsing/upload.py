"""An upload: a multipart form with one file, whose content is passed on while it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Receive

from services.gateway.http.parsing.cooperative import TimeSlice
from services.gateway.http.parsing.multipart import is_form
from shared.errors import InvalidRequest, PayloadTooLarge, RequestTimeout

if TYPE_CHECKING:  # the library defines it for type checkers only
    from python_multipart.multipart import MultipartCallbacks

_SLICE_BYTES = 64 * 1024
_MAX_FIELD_BYTES = 4096
_MAX_PARTS = 16
_MAX_HEADERS = 8
_MAX_HEADER_BYTES = 4096
_MAX_NAME_CHARS = 255
_ENVELOPE_BYTES = 64 * 1024
"""Bytes of the form besides the file."""


class Upload:
    """The fields and the file of a complete upload.

    Attributes:
        fields: The fields that are not files; the last of equal names counts.
        filename: Name of the file; None: there was none.
        size_bytes: Bytes of the file.
    """

    def __init__(self, write: Callable[[bytes], Awaitable[None]], part_bytes: int, limit: int) -> None:
        """Prepare to read an upload.

        Args:
            write: Receives the content in parts of `part_bytes`; the last one may be shorter.
            limit: Maximum bytes of the file.
        """
        self._write = write
        self._part_bytes = part_bytes
        self._limit = limit
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size_bytes = 0
        self._pending = bytearray()
        self._is_complete = False
        self._parts = 0
        self._name: bytes | None = None
        self._is_file = False
        self._value = bytearray()
        self._header, self._header_value = bytearray(), bytearray()

    async def read(self, content_type: str, receive: Receive, timeout_s: float) -> None:
        """Read the form to its end.

        Raises:
            InvalidRequest: It is no form, is incomplete, or has more than one file.
            PayloadTooLarge: The file exceeds the limit.
            RequestTimeout: It was not complete in time.
        """
        boundary = parse_options_header(content_type)[1].get(b"boundary") if is_form(content_type) else None
        if not boundary:
            raise InvalidRequest("A file is uploaded as multipart/form-data, with the fields `file` and `purpose`", param="file")
        parser = MultipartParser(boundary, self._callbacks(), max_header_count=_MAX_HEADERS, max_header_size=_MAX_HEADER_BYTES)
        try:
            async with asyncio.timeout(timeout_s):
                await self._feed(parser, receive)
        except FormParserError as e:
            raise InvalidRequest(f"The body is not a valid multipart form: {e}. Check its Content-Type") from e
        except TimeoutError:
            raise RequestTimeout(f"The body was not complete within {timeout_s:g} s. Repeat the request") from None
        if not self._is_complete:
            raise InvalidRequest("The multipart form is incomplete: its closing boundary is missing. Send the whole body")
        if self.filename is None:
            raise InvalidRequest("Missing required parameter: 'file'.", param="file")
        if self._pending:
            await self._write(bytes(self._pending))

    async def _feed(self, parser: MultipartParser, receive: Receive) -> None:
        time_slice, received, more = TimeSlice(), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise InvalidRequest("The client disconnected before its request was complete")
            data, more = message.get("body", b""), message.get("more_body", False)
            received += len(data)
            if received > self._limit + _ENVELOPE_BYTES:
                raise PayloadTooLarge(f"The file exceeds the limit of {self._limit} bytes. Send a smaller one", param="file")
            for at in range(0, len(data), _SLICE_BYTES):
                parser.write(data[at : at + _SLICE_BYTES])
                await self._flush()
                await time_slice.pause()

    async def _flush(self) -> None:
        while len(self._pending) >= self._part_bytes:
            part = bytes(self._pending[: self._part_bytes])
            del self._pending[: self._part_bytes]
            await self._write(part)

    # Events of the parser.

    def _callbacks(self) -> MultipartCallbacks:
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
        self._name, self._is_file = None, False
        self._value.clear()

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._header_value))
            self._name = options.get(b"name")
            self._is_file = self._name == b"file"
            if self._is_file:
                if self.filename is not None:
                    raise InvalidRequest("The multipart form has more than one file. Upload one at a time", param="file")
                name = options.get(b"filename", b"").decode(errors="replace")
                self.filename = "".join(c for c in name if c.isprintable())[:_MAX_NAME_CHARS] or "upload"
        self._header.clear()
        self._header_value.clear()

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.size_bytes += end - start
            if self.size_bytes > self._limit:
                raise PayloadTooLarge(f"The file exceeds the limit of {self._limit} bytes. Send a smaller one", param="file")
            self._pending += data[start:end]
        elif self._name is not None and len(self._value) + end - start <= _MAX_FIELD_BYTES:
            self._value += data[start:end]
        else:
            self._name = None  # the gateway reads no field of that size

    def _end_part(self) -> None:
        if self._name is not None and not self._is_file:
            self.fields[self._name.decode(errors="replace")] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self._is_complete = True
