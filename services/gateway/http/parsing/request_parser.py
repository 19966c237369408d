"""Parsing and validation of request bodies.

Errors name the parameter as OpenAI's do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pydantic_core import from_json

from services.gateway.domain.engine_request import EngineRequest
from services.gateway.domain.request_limits import RequestLimits
from services.gateway.domain.request_validation import check_supported
from services.gateway.http.parsing.json_cost import check_json_cost
from services.gateway.http.parsing.multipart import is_form, text_fields
from services.gateway.http.parsing.validation import validate_body
from services.gateway.http.translation import messages_request, responses_request
from services.gateway.http.translation.chat_translator import ClientRequest
from services.gateway.http.translation.ollama_requests import OLLAMA_ROUTES, OllamaReply, translate_request
from shared.contracts.inference import FORWARDED, Endpoint
from shared.contracts.models import ModelCard
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, OtherRequest
from shared.errors import InvalidRequest, NotFound

AnyRequest = ChatCompletionRequest | CompletionRequest | EmbeddingRequest | OtherRequest
REQUESTS: dict[Endpoint, type[AnyRequest]] = {
    "chat": ChatCompletionRequest,
    "completion": CompletionRequest,
    "embedding": EmbeddingRequest,
    "other": OtherRequest,
}


@dataclass(frozen=True)
class BodyLimits:
    """Limits on one body.

    Attributes:
        values: Most values of a JSON body; see `json_cost`.
        counts: Most prompts, choices, messages and so on.
    """

    values: int
    counts: RequestLimits = RequestLimits()


@dataclass(frozen=True)
class ParsedRequest:
    """A valid request; its model has not been looked up yet.

    Attributes:
        client_request: The request of another API that this one was translated from.
        ollama: How the response is translated, for a request of Ollama's API.
    """

    request: AnyRequest
    engine_request: EngineRequest
    client_request: ClientRequest | None = None
    ollama: OllamaReply | None = None

    @property
    def stream(self) -> bool:
        return not isinstance(self.request, EmbeddingRequest) and bool(self.request.stream)

    @property
    def accepts_comments(self) -> bool:
        """True if the client receives server-sent events, and comments while it waits."""
        return self.stream and self.ollama is None


async def parse_body(
    endpoint: Endpoint,
    body: bytes,
    limits: BodyLimits,
    route: str,
    query: str,
    headers: Mapping[str, str],
    history: bytes | None = None,
) -> ParsedRequest:
    """Parse and validate a body.

    Args:
        limits: Limits on what the body may hold.
        route: Path of the request.
        query: Query string of the request.
        headers: Headers of the request, with lower-case names.
        history: For a route that is translated to chat completions: the conversation before the
            request, as a JSON list of the API's items. None: the route is not translated.

    Raises:
        InvalidRequest: The body is no valid request, or exceeds a limit.
        PayloadTooLarge: The body holds too many values.
    """
    if route in OLLAMA_ROUTES:
        return await _parse_ollama(body, limits, route)
    if endpoint != "other" or not is_form(headers.get("content-type", "")):
        await check_json_cost(body, limits.values)
    if history is not None:
        return await _parse_translated(route, body, history, limits)
    if endpoint != "other":
        parsed = parse(endpoint, body)
        if not isinstance(parsed.request, OtherRequest):
            limits.counts.check(parsed.request)
        return parsed
    return await parse_passthrough(body, route, query, headers)


def parse(endpoint: Endpoint, body: bytes) -> ParsedRequest:
    """Parse a JSON body of one of OpenAI's endpoints."""
    return ParsedRequest(validate_body(REQUESTS[endpoint], body), EngineRequest(endpoint, body))


def _translate_responses(body: bytes, history: bytes) -> tuple[bytes, ClientRequest]:
    return responses_request.to_chat(validate_body(responses_request.ResponsesRequest, body), from_json(history))


def _translate_messages(body: bytes, history: bytes) -> tuple[bytes, ClientRequest]:
    return messages_request.to_chat(validate_body(messages_request.MessagesRequest, body))


def _translate_count(body: bytes, history: bytes) -> tuple[bytes, ClientRequest]:
    return messages_request.to_chat(validate_body(messages_request.CountTokensRequest, body))


TRANSLATED: dict[str, Callable[[bytes, bytes], tuple[bytes, ClientRequest]]] = {
    "/v1/responses": _translate_responses,
    "/v1/messages": _translate_messages,
    "/v1/messages/count_tokens": _translate_count,
}
"""Routes that are translated to chat completions."""


async def _parse_translated(route: str, body: bytes, history: bytes, limits: BodyLimits) -> ParsedRequest:
    """Translate a body to that of a chat completion, and parse the result."""
    translated, client_request = TRANSLATED[route](body, history)
    await check_json_cost(translated, limits.values)
    request = validate_body(ChatCompletionRequest, translated)
    limits.counts.check(request)
    return ParsedRequest(request, EngineRequest("chat", translated), client_request)


async def _parse_ollama(body: bytes, limits: BodyLimits, route: str) -> ParsedRequest:
    """Translate a body of Ollama's API, and parse the result like OpenAI's."""
    await check_json_cost(body, limits.values)
    translated = translate_request(route, body)
    parsed = parse(translated.endpoint, translated.body)
    if not isinstance(parsed.request, OtherRequest):
        limits.counts.check(parsed.request)
    return replace(parsed, ollama=translated.reply)


async def parse_passthrough(body: bytes, route: str, query: str, headers: Mapping[str, str]) -> ParsedRequest:
    """Parse JSON or a form for a route that only engines serve."""
    forwarded = {name: headers[name] for name in FORWARDED if name in headers}
    content_type = headers.get("content-type", "")
    if not is_form(content_type):
        return ParsedRequest(validate_body(OtherRequest, body), EngineRequest("other", body, route, query, forwarded))
    fields = await text_fields(content_type, body)
    if not fields.get("model"):
        raise InvalidRequest("Missing required parameter: 'model'.", param="model")
    request = OtherRequest(model=fields["model"], stream=fields.get("stream", "").lower() in ("true", "1"))
    return ParsedRequest(request, EngineRequest("other", body, route, query, forwarded, content_type))


def check_model(parsed: ParsedRequest, card: ModelCard) -> None:
    """Check that the model and its engine can serve the request."""
    if not isinstance(parsed.request, OtherRequest):
        check_supported(parsed.request, card)
    elif parsed.engine_request.route not in card.routes:
        raise NotFound(
            f"The engine of {card.name} ({card.spec.engine}) does not serve {parsed.engine_request.route}", param="model"
        )
