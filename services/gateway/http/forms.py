"""Fields of a multipart form, found without taking its files apart: the gateway reads `model` and `stream`, the engine all of it."""

from __future__ import annotations

import re
from email.message import Message

from shared.errors import InvalidRequest

MULTIPART = "multipart/form-data"
_NAME = re.compile(rb'content-disposition:[^\r\n]*?;\s*name="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
_FILE = re.compile(rb"content-disposition:[^\r\n]*?;\s*filename\*?=", re.IGNORECASE)
_LONGEST_FIELD = 64 * 1024


def is_form(content_type: str) -> bool:
    return content_type.split(";", 1)[0].strip().lower() == MULTIPART


def text_fields(content_type: str, body: bytes) -> dict[str, str]:
    """The fields that are no files, each by its last value. Raises `InvalidRequest` for a body that is not such a form."""
    boundary = _boundary(content_type)
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary)
    if len(parts) < 3 or not parts[-1].startswith(b"--"):
        raise InvalidRequest("The body is not the multipart form that its Content-Type announces, or is not whole")
    fields: dict[str, str] = {}
    for part in parts[1:-1]:
        head, separator, value = part.partition(b"\r\n\r\n")
        name = _NAME.search(head)
        if separator and name is not None and not _FILE.search(head) and len(value) <= _LONGEST_FIELD:
            fields[name[1].decode(errors="replace")] = value.decode(errors="replace")
    return fields


def _boundary(content_type: str) -> bytes:
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if not boundary:
        raise InvalidRequest("The Content-Type of a multipart form names its boundary")
    return boundary.encode("latin-1", "replace")
