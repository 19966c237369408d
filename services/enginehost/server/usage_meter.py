"""Read the token usage from an engine's response while it is forwarded."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

from shared.contracts.inference import Usage

_EVENT_END = re.compile(rb"\r?\n\r?\n")
_DATA = re.compile(rb"^data: ?(\{.*)", re.MULTILINE)
"""An object in an event. An event's name may precede it."""
_USAGE = re.compile(rb'"usage": ?(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_KEPT_BYTES = 64 * 1024
"""Largest event that is held back, and size of the end of a stream that is searched for usage."""
_BEGIN_BYTES = 4096
"""Size of the beginning of a stream that is searched: the first event may have the prompt's tokens.
"""
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
        self._begin = b""
        self._tail = bytearray()
        self._usage: Usage | None = None
        self.events = 0

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to forward now, of `data` and of earlier held-back bytes."""
        if self._hide:
            return self._without_usage(data)
        if self._stream:
            self.events += data.count(b"data: {")
            if len(self._begin) < _BEGIN_BYTES:
                self._begin += data[:_BEGIN_BYTES]
            self._tail += data
            del self._tail[:-_KEPT_BYTES]
        elif self._json and len(self._tail) <= _MAX_JSON_BYTES:
            self._tail += data
        return data

    def finish(self) -> bytes:
        """Return the bytes still held back. Afterwards `usage` is final."""
        if self._stream:
            for part in (self._begin, bytes(self._tail)):
                for event in _EVENT_END.split(part):
                    self._note(event)
            if self._usage is None and (found := _USAGE.findall(self._tail)):  # of an event that is larger than the tail
                self._usage = usage_of({"usage": _parse(found[-1])})
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
        if b'"usage"' not in event or (data := _DATA.search(event)) is None:
            return False
        message = _parse(data[1])
        found = _find_usage(message)
        if found is None:
            return False
        before = self._usage or Usage(prompt_tokens=0)
        self._usage = Usage(
            prompt_tokens=found.prompt_tokens or before.prompt_tokens,
            completion_tokens=found.completion_tokens or before.completion_tokens,
            cached_tokens=found.cached_tokens or before.cached_tokens,
        )
        return isinstance(message, dict) and message.get("choices") == []


def _parse(data: bytes) -> Any:
    try:
        return from_json(data)
    except ValueError:
        return None


def _find_usage(message: Any) -> Usage | None:
    """Return the usage in an event: also in the events of the Responses and Messages APIs."""
    places = (message, message.get("response"), message.get("message")) if isinstance(message, dict) else ()
    return next((found for place in places if (found := usage_of(place)) is not None), None)


def usage_of(message: Any) -> Usage | None:
    """Return the usage in an OpenAI response or event; None if it has none.

    Also reads the field names of the Responses and Messages APIs.
    """
    found = message.get("usage") if isinstance(message, dict) else None
    if not isinstance(found, dict):
        return None

    def number(*names: str) -> int:
        return next((v for n in names if isinstance(v := found.get(n), int) and v >= 0), 0)

    details = found.get("prompt_tokens_details") or found.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    # The Messages API does not count these as `input_tokens`.
    apart = number("cache_read_input_tokens"), number("cache_creation_input_tokens")
    return Usage(
        prompt_tokens=number("prompt_tokens", "input_tokens") + sum(apart),
        completion_tokens=number("completion_tokens", "output_tokens"),
        cached_tokens=(cached if isinstance(cached, int) else 0) or apart[0],
    )
