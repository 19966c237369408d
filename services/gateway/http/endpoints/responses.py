"""OpenAI's Responses API for engines that have only chat completions, and its stored responses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import ClassVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from services.gateway.adapters.response_store import StoredValue
from services.gateway.authorization import Authorizer
from services.gateway.http.endpoints.translated import TranslatedEndpoint, unique_part
from services.gateway.http.errors import json_response
from services.gateway.http.parsing.request_parser import ParsedRequest
from services.gateway.http.scopes import caller_of
from services.gateway.http.translation.chat_translator import ChatTranslator
from services.gateway.http.translation.responses import ResponseTranslator
from services.gateway.http.translation.responses_request import ResponsesRequest
from services.gateway.loop import Gateway
from shared.compact_json import encode_json
from shared.errors import NotFound

ROUTE = "/v1/responses"
_PREVIOUS = "previous_response_id"


class Responses(TranslatedEndpoint):
    """`POST /v1/responses`."""

    params: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    async def history(self, given: ParsedRequest, scope: Scope) -> bytes:
        previous = (given.request.model_extra or {}).get(_PREVIOUS)
        if not isinstance(previous, str):  # absent, or refused when the request is translated
            return await super().history(given, scope)
        stored = await self._gateway.responses.get(_owner(scope), previous)
        if stored is None:
            raise NotFound(
                f"The previous response {previous[:100]!r} is not stored. Send its conversation instead", param=_PREVIOUS
            )
        return stored.items

    def translator(self, parsed: ParsedRequest, scope: Scope) -> ResponseTranslator:
        request = _request_of(parsed)
        # The items of a request whose body is in a file lack the pieces that only the file has.
        is_small = parsed.engine_request.held is None and self._gateway.responses.accepts(len(parsed.engine_request.body))
        is_stored = request.store is not False and is_small
        return ResponseTranslator(request, f"resp_{unique_part(parsed, scope)}", int(time.time()), is_stored=is_stored)

    async def before_end(self, parsed: ParsedRequest, translator: ChatTranslator, scope: Scope) -> None:
        """Store the response, so that its client can continue it at once."""
        assert isinstance(translator, ResponseTranslator)
        assert parsed.client_request is not None
        if not translator.is_storable:
            translator.note_not_stored()
            return
        response = translator.body()
        stored = StoredValue(encode_json(response), encode_json([*parsed.client_request.items, *translator.items]))
        if not await self._gateway.responses.put(_owner(scope), response["id"], stored):
            translator.note_not_stored()


class StoredResponses:
    """`GET` and `DELETE /v1/responses/{id}`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def read(self, request: Request) -> Response:
        response_id = request.path_params["id"]
        stored = await self._gateway.responses.get(_owner(request.scope), response_id)
        if stored is None:
            raise _not_found(response_id)
        return Response(stored.response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["id"]
        if not await self._gateway.responses.delete(_owner(request.scope), response_id):
            raise _not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})


def _owner(scope: Scope) -> str:
    """Return the digest of the API key of a request, whether or not a key is needed."""
    return caller_of(scope).digest or Authorizer.key_hash(Headers(scope=scope))


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"The response {response_id[:100]!r} is not stored")


def _request_of(parsed: ParsedRequest) -> ResponsesRequest:
    assert parsed.client_request is not None
    assert isinstance(parsed.client_request.request, ResponsesRequest)
    return parsed.client_request.request
