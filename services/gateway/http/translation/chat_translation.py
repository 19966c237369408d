"""Translation of a chat completion's bytes, its event stream or its whole body, to another API."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from services.gateway.http.translation.chat_stream import ChatStreamDecoder, Comment, Done, StreamError
from services.gateway.http.translation.chat_translator import ChatTranslator, format_events
from shared.errors import EngineFailed

log = logging.getLogger(__name__)
_MALFORMED = "The engine sent a malformed chat completion"
_ERRORS = (ValueError, KeyError, TypeError, AttributeError, IndexError)


class ChatTranslation:
    """Translate one response. Comments of a stream are kept.

    Args:
        convert_error: Converts an engine's error to the API's form, given its HTTP status and body.
        before_end: Called when the translator has finished, before its last events are sent.
    """

    content_type = None
    ignored: tuple[str, ...] = ()

    def __init__(
        self,
        translator: ChatTranslator,
        convert_error: Callable[[int, dict[str, Any]], dict[str, Any]],
        before_end: Callable[[], Awaitable[None]],
    ) -> None:
        self._translator = translator
        self._convert_error = convert_error
        self._before_end = before_end
        self._decoder = ChatStreamDecoder()
        self._is_complete = False
        self.is_done = False

    def on_headers(self, server_timing: str) -> None:
        """No-op: the response has no durations."""

    def feed(self, data: bytes, now: float) -> bytes:
        """Translate events. After an error, or an event that cannot be translated, it is done."""
        out = bytearray()
        try:
            for decoded in self._decoder.feed(data):
                if isinstance(decoded, Comment):
                    out += decoded.raw
                elif isinstance(decoded, StreamError):
                    return bytes(out) + self._fail(decoded.code, decoded.message)
                elif isinstance(decoded, Done):
                    self.is_done = self._is_complete = True
                    break
                else:
                    out += format_events(self._translator.add(decoded))
        except _ERRORS as e:
            return bytes(out) + self._fail_malformed(e)
        return bytes(out)

    async def end(self, now: float) -> bytes:
        if not self.is_done:
            return self._fail(None, "The engine ended the response early")
        if not self._is_complete:
            return b""
        try:
            events = self._translator.finish()
            await self._before_end()
        except _ERRORS as e:
            return self._fail_malformed(e)
        return format_events(events)

    async def translate_body(self, status: int, body: bytes, now: float) -> tuple[int, dict[str, Any]]:
        """Translate a whole body. Raises `EngineFailed` if it is no chat completion."""
        try:
            data = json.loads(body)
            if not isinstance(data, dict):
                raise ValueError("a chat completion is an object")
            if status >= 400:
                return status, self._convert_error(status, data)
            self._translator.add(data)
            self._translator.finish()
            await self._before_end()
            return status, self._translator.body()
        except _ERRORS as e:
            raise EngineFailed(f"{_MALFORMED}: {type(e).__name__}") from e

    def _fail_malformed(self, error: Exception) -> bytes:
        log.warning("failed to translate a chat completion", extra={"error": repr(error)})
        return self._fail(None, _MALFORMED)

    def _fail(self, code: str | None, message: str) -> bytes:
        self.is_done = True
        return format_events(self._translator.fail(code, message))
