"""Read the token usage from an engine's response while it is forwarded."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

from shared.contracts.inference import Usage

_EVENT_END = re.compile(rb"\r?\n\r?\n")
_KEPT_BYTES = 64 * 1024
"""Largest event that is held back, and size of the end of a stream that is searched for usage."""
_MAX_JSON_BYTES = 8 << 20
"""Larger JSON responses are forwarded without reading their usage."""


class UsageMeter:
    """Watches the bytes of one response for its usage.

    Attributes:
        events: Events of the stream so far: the number of tokens, if the engine reports no usage.
    """

    def __init__(self, content_type: str, *, hide_usage: bool) -> None:
        """Create the meter of a response.

        Args:
            content_type: Of the response; other types than event streams and JSON have no usage.
            hide_usage: Remove the usage event from a stream, because the client did not request it.
        """
        self._stream = content_type.startswith("text/event-stream")
        self._json = content_type.startswith("application/json")
        self._hide = hide_usage and self._stream
        self._rest = b""
        self._tail = bytearray()
        self._usage: Usage | None = None
        self.events = 0

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to forward now, of `data` and of earlier held-back bytes."""
        if self._hide:
            return self._without_usage(data)
        if self._stream:
            self.events += data.count(b"data: {")
            self._tail += data
            del self._tail[:-_KEPT_BYTES]
        elif self._json and len(self._tail) <= _MAX_JSON_BYTES:
            self._tail += data
        return data

    def finish(self) -> bytes:
        """Return the bytes still held back. Afterwards `usage` is final."""
        if self._stream:
            for event in _EVENT_END.split(bytes(self._tail)):
                self._note(event)
        elif self._json and len(self._tail) <= _MAX_JSON_BYTES:
            self._usage = usage_of(_parse(bytes(self._tail)))
        rest, self._rest = self._rest, b""
        return rest

    @property
    def usage(self) -> Usage:
        return self._usage or Usage(prompt_tokens=0, completion_tokens=self.events)

    def _without_usage(self, data: bytes) -> bytes:
        """Return the complete events without the usage event, and hold back an incomplete one.

        Events above the limit are forwarded unread.
        """
        text = self._rest + data if self._rest else data
        end = 0
        kept: list[bytes] = []
        for match in _EVENT_END.finditer(text):
            event, match_end = text[end : match.end()], match.end()
            self.events += event.startswith(b"data: {")
            if not (b'"usage"' in event and self._note(event)):
                kept.append(event)
            end = match_end
        self._rest = text[end:]
        if len(self._rest) > _KEPT_BYTES:
            kept.append(self._rest)
            self._rest = b""
        return b"".join(kept)

    def _note(self, event: bytes) -> bool:
        """Record the usage of `event`. Returns whether the event contains nothing else."""
        if b'"usage"' not in event or not event.startswith(b"data: {"):
            return False
        message = _parse(event[6:])
        found = usage_of(message)
        if found is None:
            return False
        self._usage = found
        return isinstance(message, dict) and message.get("choices") == []


def _parse(data: bytes) -> Any:
    try:
        return from_json(data)
    except ValueError:
        return None


def usage_of(message: Any) -> Usage | None:
    """Return the usage in an OpenAI response or event; None if it has none.

    Also reads the field names of the Responses and Messages APIs.
    """
    found = message.get("usage") if isinstance(message, dict) else None
    if not isinstance(found, dict):
        return None

    def number(*names: str) -> int:
        return next((v for n in names if isinstance(v := found.get(n), int) and v >= 0), 0)

    details = found.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Usage(
        prompt_tokens=number("prompt_tokens", "input_tokens"),
        completion_tokens=number("completion_tokens", "output_tokens"),
        cached_tokens=cached if isinstance(cached, int) else 0,
    )
