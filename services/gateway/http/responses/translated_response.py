"""An ASGI `send` that receives a chat completion and sends the response of another API.

Events are translated as they pass, whole bodies once they are complete. Comments of a stream are
sent as they are. After an error, or an event that cannot be translated, the response ends.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Send

from services.gateway.http.errors import json_response
from services.gateway.http.translation.chat_stream import ChatStreamDecoder, Comment, Done, StreamError
from services.gateway.http.translation.chat_translator import ChatTranslator, format_events
from shared.errors import EngineFailed

log = logging.getLogger(__name__)
_EVENTS = "text/event-stream"
_MALFORMED = "The engine sent a malformed chat completion"
_ERRORS = (ValueError, KeyError, TypeError, AttributeError, IndexError)


class TranslatedResponse:
    """Translate one response.

    Args:
        send: Sends to the client.
        convert_error: Converts an engine's error to the API's form, given its HTTP status and body.
        before_end: Called when the translator has finished, before its last events are sent.
    """

    def __init__(
        self,
        send: Send,
        translator: ChatTranslator,
        convert_error: Callable[[int, dict[str, Any]], dict[str, Any]],
        before_end: Callable[[], Awaitable[None]],
    ) -> None:
        self._send = send
        self._translator = translator
        self._convert_error = convert_error
        self._before_end = before_end
        self._decoder = ChatStreamDecoder()
        self._start: Message = {}
        self._body = bytearray()
        self._streams = False
        self._is_done = False

    async def __call__(self, message: Message) -> None:
        """Receive a message of the chat completion. Raises `EngineFailed` if it is none."""
        if message["type"] == "http.response.start":
            self._start = message
            self._streams = Headers(raw=message["headers"]).get("content-type", "").startswith(_EVENTS)
            if self._streams:
                await self._send(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._is_done:
            return
        elif self._streams:
            await self._stream(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_whole()

    async def _stream(self, message: Message) -> None:
        data = await self._translate(message.get("body", b""))
        if not message.get("more_body", False) and not self._is_done:
            data += self._fail(None, "The engine ended the response early")
        if data or self._is_done:
            await self._send({"type": "http.response.body", "body": data, "more_body": not self._is_done})

    async def _translate(self, data: bytes) -> bytes:
        out = bytearray()
        try:
            for decoded in self._decoder.feed(data):
                if isinstance(decoded, Comment):
                    out += decoded.raw
                elif isinstance(decoded, StreamError):
                    return bytes(out) + self._fail(decoded.code, decoded.message)
                elif isinstance(decoded, Done):
                    self._is_done = True
                    return bytes(out) + await self._end()
                else:
                    out += format_events(self._translator.add(decoded))
        except _ERRORS as e:
            log.warning("failed to translate a chat completion", extra={"error": repr(e)})
            return bytes(out) + self._fail(None, _MALFORMED)
        return bytes(out)

    def _fail(self, code: str | None, message: str) -> bytes:
        self._is_done = True
        return format_events(self._translator.fail(code, message))

    async def _end(self) -> bytes:
        events = self._translator.finish()
        await self._before_end()
        return format_events(events)

    async def _send_whole(self) -> None:
        self._is_done, status = True, self._start["status"]
        try:
            data = _parse(self._body)
            if status < 400:
                self._translator.add(data)
                await self._end()
            body = self._translator.body() if status < 400 else self._convert_error(status, data)
        except _ERRORS as e:
            raise EngineFailed(f"{_MALFORMED}: {type(e).__name__}") from e
        response = json_response(body, status)
        headers = MutableHeaders(raw=list(self._start["headers"]))
        headers["content-type"], headers["content-length"] = "application/json", str(len(response.body))
        await self._send({**self._start, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": response.body})


def _parse(body: bytes | bytearray) -> dict[str, Any]:
    data = json.loads(body)
    if not isinstance(data, dict):
        raise ValueError("a chat completion is an object")
    return data
