"""Incremental decoding of a chat completion's event stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment of the stream, as the gateway sends while a model wakes."""

    raw: bytes


@dataclass(frozen=True, slots=True)
class StreamError:
    """The error that ends a stream."""

    code: str | None
    message: str


class Done:
    """The end of the stream: `[DONE]`."""


Decoded = dict[str, Any] | Comment | StreamError | Done


class ChatStreamDecoder:
    """Decode server-sent events, which may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Decoded]:
        """Yield what `data` completes. Raises `ValueError` for an event that is not JSON."""
        if b"\r" in data or self._rest.endswith(b"\r"):
            data, self._rest = (self._rest + data).replace(b"\r\n", b"\n"), b""
        blocks = (self._rest + data).split(b"\n\n")
        self._rest = blocks.pop()
        for block in blocks:
            if (event := _decode(block)) is not None:
                yield event


def _decode(block: bytes) -> Decoded | None:
    name, parts, comments = b"", [], []
    for line in block.split(b"\n"):
        if line.startswith(b":"):
            comments.append(line)
        elif line.startswith(b"data:"):
            parts.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            name = line[6:].strip()
    if not parts:
        return Comment(b"\n".join(comments) + b"\n\n") if comments else None
    text = b"\n".join(parts)
    if text == b"[DONE]":
        return Done()
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("an event of a chat completion is an object")
    if name == b"error" or data.get("error"):
        return _error(data)
    return data


def _error(data: dict[str, Any]) -> StreamError:
    error = data.get("error") or data
    if not isinstance(error, dict):
        return StreamError(None, str(error))
    code = error.get("code")
    return StreamError(code if isinstance(code, str) else None, str(error.get("message") or "The response broke off"))
