"""Endpoints of APIs that are translated to chat completions for engines that lack them.

If the model's engine declares the route, its request and response pass through. Otherwise the
request becomes a chat completion, with the same admission, limits, metering and failover, and its
response is translated back.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.gateway.adapters.idempotency_store import digest
from services.gateway.http.endpoints.inference import Inference
from services.gateway.http.endpoints.received import ReceivedRequest, receive_request
from services.gateway.http.parsing.idempotency_key import idempotency_key_of
from services.gateway.http.parsing.parser_process import ParserProcess
from services.gateway.http.parsing.request_parser import ParsedRequest
from services.gateway.http.responses.translated_send import TranslatedSend
from services.gateway.http.translation.chat_translation import ChatTranslation
from services.gateway.http.translation.chat_translator import ChatTranslator
from services.gateway.loop import Gateway
from shared.contracts.inference import FORWARDED
from shared.errors import PayloadTooLarge, ThawError

_NO_HISTORY = b"[]"


class TranslatedEndpoint(ABC):
    """The ASGI endpoint of one route."""

    params: ClassVar[Mapping[str, str]]
    """Fields of a chat completion that have another name in this API, for errors."""

    def __init__(self, gateway: Gateway, parsers: ParserProcess) -> None:
        self._gateway = gateway
        self._parsers = parsers
        self._passthrough = Inference(gateway, "other", parsers)
        self._chat = Inference(gateway, "chat", parsers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._passthrough.body_limit(scope)
        async with receive_request(self._gateway, scope, receive, limit, ("other", "chat")) as received:
            given = await self._parse(received, scope)
            await self._gateway.readiness.await_model(given.request.model)
            routes = self._gateway.catalog.resolve(given.request.model).routes
            if not given.engine_request.is_json or scope["path"] in routes:
                await self._passthrough.infer(given, received.reservation, received.arrived_at, scope, receive, send)
                return
            try:
                await self._translate(received, given, scope, receive, send)
            except ThawError as e:
                e.param = self._rename(e.param)
                raise

    async def history(self, given: ParsedRequest, scope: Scope) -> bytes:
        """Return the conversation before a request, as a JSON list of the API's items."""
        return _NO_HISTORY

    @abstractmethod
    def translator(self, parsed: ParsedRequest, scope: Scope) -> ChatTranslator:
        """Make the translator of a response."""

    async def before_end(self, parsed: ParsedRequest, translator: ChatTranslator, scope: Scope) -> None:  # noqa: B027
        """Do what is due between the end of a response and its last event."""

    def convert_error(self, status: int, data: dict[str, Any]) -> dict[str, Any]:
        """Convert an engine's error to this API's form."""
        return data

    async def _parse(self, received: ReceivedRequest, scope: Scope, history: bytes | None = None) -> ParsedRequest:
        headers, query = Headers(scope=scope), scope["query_string"].decode("latin-1")
        names = {name: headers[name] for name in (*FORWARDED, "content-type") if name in headers}
        parsed = await self._parsers.parse("other", received.body.content, scope["path"], query, names, history)
        return received.with_held(parsed)

    async def _translate(self, received: ReceivedRequest, given: ParsedRequest, scope: Scope, receive: Receive, send: Send) -> None:
        history = await self.history(given, scope)
        received.reservation.grow(len(history))
        parsed = await self._parse(received, scope, history)
        size, limit = len(parsed.engine_request.body), self._chat.body_limit(scope)
        if size > limit:
            raise PayloadTooLarge(f"The conversation has {size} bytes, and the limit is {limit}. Send a shorter one")
        translator = self.translator(parsed, scope)

        async def before_end() -> None:
            await self.before_end(parsed, translator, scope)

        translated = TranslatedSend(send, ChatTranslation(translator, self.convert_error, before_end))
        await self._chat.infer(parsed, received.reservation, received.arrived_at, scope, receive, translated)

    def _rename(self, param: str | None) -> str | None:
        """Rename a field of the chat completion to that of this API."""
        if param is None:
            return None
        name = next((name for name in self.params if param == name or param.startswith((f"{name}[", f"{name}."))), None)
        return param if name is None else self.params[name]


def unique_part(parsed: ParsedRequest, scope: Scope) -> str:
    """Return a new id, or that of the first response to a repeated idempotent request."""
    name = idempotency_key_of(scope)
    return uuid.uuid4().hex if name is None else digest(name.encode(), parsed.engine_request.identity)[:32]
