"""An ASGI `send` that translates a response in OpenAI's form."""

from __future__ import annotations

import time
from typing import Protocol

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from services.gateway.http.responses.sliced_json import encode_in_slices
from shared.compact_json import encode_json

_EVENTS = "text/event-stream"


class Translator(Protocol):
    """The translation of one response."""

    @property
    def content_type(self) -> str | None:
        """The content type of a stream; None: as it is."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of fields without effect."""

    @property
    def is_done(self) -> bool:
        """True once the rest of an event stream is of no use: it has ended, or has an error."""

    def on_headers(self, server_timing: str) -> None: ...
    def feed(self, data: bytes, now: float) -> bytes:
        """Translate bytes of an event stream."""

    async def end(self, now: float) -> bytes:
        """Return what follows an event stream. Called once."""

    async def translate_body(self, status: int, body: bytes, now: float) -> tuple[int, object]:
        """Translate a whole body. Returns the status and the JSON value."""


class TranslatedSend:
    """Translate events as they pass, and whole bodies once they are complete."""

    def __init__(self, send: Send, translator: Translator) -> None:
        self._send = send
        self._translator = translator
        self._start: Message = {}
        self._body = bytearray()
        self._streams = False
        self._has_ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._has_ended:
            return
        elif self._streams:
            await self._continue(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._complete()

    async def _begin(self, message: Message) -> None:
        self._start = message
        headers = MutableHeaders(scope=message)
        self._translator.on_headers(headers.get("server-timing", ""))
        if self._translator.ignored:
            names = (*filter(None, [headers.get("x-thaw-ignored", "")]), *self._translator.ignored)
            headers["x-thaw-ignored"] = ", ".join(name for name in names if name.isascii() and name.isprintable())[:2000]
        self._streams = headers.get("content-type", "").startswith(_EVENTS)
        if self._streams:
            if (content_type := self._translator.content_type) is not None:
                headers["content-type"] = content_type
            await self._send(message)

    async def _continue(self, message: Message) -> None:
        now = time.monotonic()
        data = self._translator.feed(message.get("body", b""), now)
        more = message.get("more_body", False) and not self._translator.is_done
        if not more:
            self._has_ended = True
            data += await self._translator.end(now)
        if data or not more:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _complete(self) -> None:
        status, value = await self._translator.translate_body(self._start["status"], bytes(self._body), time.monotonic())
        body = await encode_in_slices(value) if isinstance(value, dict) else encode_json(value)
        headers = MutableHeaders(scope=self._start)
        headers["content-type"], headers["content-length"] = "application/json", str(len(body))
        self._start["status"] = status
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": body})
