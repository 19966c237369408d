"""Anthropic's Messages API for engines that have only chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.types import Scope

from services.gateway.http.endpoints.translated import TranslatedEndpoint, unique_part
from services.gateway.http.error_formats import anthropic_error
from services.gateway.http.parsing.request_parser import ParsedRequest
from services.gateway.http.translation.messages import MessageTranslator
from services.gateway.http.translation.messages_request import MessagesRequest

ROUTE = "/v1/messages"


class Messages(TranslatedEndpoint):
    """`POST /v1/messages`."""

    params: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
    }

    def translator(self, parsed: ParsedRequest, scope: Scope) -> MessageTranslator:
        assert parsed.client_request is not None
        assert isinstance(parsed.client_request.request, MessagesRequest)
        return MessageTranslator(parsed.client_request.request, f"msg_{unique_part(parsed, scope)}")

    def convert_error(self, status: int, data: dict[str, Any]) -> dict[str, Any]:
        error = data.get("error")
        if data.get("type") == "error" or not isinstance(error, dict):
            return data
        return anthropic_error(status, str(error.get("message")))
