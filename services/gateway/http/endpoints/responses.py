"""OpenAI's Responses API for engines that have only chat completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import ClassVar

from starlette.types import Scope

from services.gateway.adapters.idempotency_store import digest
from services.gateway.http.endpoints.translated import TranslatedEndpoint
from services.gateway.http.parsing.idempotency_key import idempotency_key_of
from services.gateway.http.parsing.request_parser import ParsedRequest
from services.gateway.http.translation.responses import ResponseTranslator
from services.gateway.http.translation.responses_request import ResponsesRequest
from shared.errors import UnsupportedParameter

ROUTE = "/v1/responses"


class Responses(TranslatedEndpoint):
    """`POST /v1/responses`."""

    params: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    async def history(self, given: ParsedRequest, scope: Scope) -> bytes:
        if (given.request.model_extra or {}).get("previous_response_id"):
            raise UnsupportedParameter(
                "'previous_response_id' is not supported. Send the conversation", param="previous_response_id"
            )
        return await super().history(given, scope)

    def translator(self, parsed: ParsedRequest, scope: Scope) -> ResponseTranslator:
        assert parsed.client_request is not None
        request = parsed.client_request.request
        assert isinstance(request, ResponsesRequest)
        return ResponseTranslator(request, f"resp_{_unique_part(parsed, scope)}", int(time.time()), is_stored=False)


def _unique_part(parsed: ParsedRequest, scope: Scope) -> str:
    """Return a new id, or that of the first response to a repeated idempotent request."""
    name = idempotency_key_of(scope)
    return uuid.uuid4().hex if name is None else digest(name.encode(), parsed.engine_request.body)[:32]
