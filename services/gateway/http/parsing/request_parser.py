"""From the bytes of a body to a checked request; every fault names the parameter as OpenAI does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from services.gateway.domain.engine_request import Ask
from services.gateway.domain.request_validation import check_supported
from services.gateway.http.parsing.json_cost import require_light
from services.gateway.http.parsing.multipart import is_form, text_fields
from shared.contracts.inference import FORWARDED, Endpoint
from shared.contracts.models import ModelCard
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, OtherRequest
from shared.errors import InvalidRequest, NotFound

M = TypeVar("M", bound=BaseModel)
AnyRequest = ChatCompletionRequest | CompletionRequest | EmbeddingRequest | OtherRequest
REQUESTS: dict[Endpoint, type[AnyRequest]] = {
    "chat": ChatCompletionRequest,
    "completion": CompletionRequest,
    "embedding": EmbeddingRequest,
    "other": OtherRequest,
}


@dataclass(frozen=True)
class Parsed:
    """A request that has been checked as far as can be without its model."""

    request: AnyRequest
    ask: Ask

    @property
    def stream(self) -> bool:
        return not isinstance(self.request, EmbeddingRequest) and bool(self.request.stream)


async def parse_body(
    endpoint: Endpoint, body: bytes, max_values: int, route: str, query: str, headers: Mapping[str, str]
) -> Parsed:
    """Parse and validate a body.

    Args:
        max_values: Most values of a JSON body; see `json_cost`.
        route: Path of the request.
        query: Query string of the request.
        headers: Headers of the request, with lower-case names.

    Raises:
        InvalidRequest: The body is no valid request.
        PayloadTooLarge: The body holds too many values.
    """
    if not is_form(headers.get("content-type", "")):
        await require_light(body, max_values)
    if endpoint != "other":
        return parse(endpoint, body)
    return await parse_other(body, route, query, headers)


def parse(endpoint: Endpoint, body: bytes) -> Parsed:
    return Parsed(validated(REQUESTS[endpoint], body), Ask(endpoint, body))


async def parse_other(body: bytes, route: str, query: str, headers: Mapping[str, str]) -> Parsed:
    """A request of a route that is not ours: JSON or a multipart form, with a model in it."""
    forwarded = {name: headers[name] for name in FORWARDED if name in headers}
    kind = headers.get("content-type", "")
    if not is_form(kind):
        return Parsed(validated(OtherRequest, body), Ask("other", body, route, query, forwarded))
    fields = await text_fields(kind, body)
    if not fields.get("model"):
        raise InvalidRequest("Missing required parameter: 'model'.", param="model")
    request = OtherRequest(model=fields["model"], stream=fields.get("stream", "").lower() in ("true", "1"))
    return Parsed(request, Ask("other", body, route, query, forwarded, kind))


def check(parsed: Parsed, card: ModelCard) -> None:
    """Whether the model and its engine can do what is asked."""
    if not isinstance(parsed.request, OtherRequest):
        check_supported(parsed.request, card)
    elif parsed.ask.route not in card.routes:
        raise NotFound(f"The engine of {card.name} ({card.spec.engine}) does not serve {parsed.ask.route}", param="model")


def validated(kind: type[M], body: bytes) -> M:
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        raise fault(e, body) from e


def fault(error: ValidationError, body: bytes) -> InvalidRequest:
    """One fault of a body, told the way OpenAI tells it: of the first field at fault the deepest, since each branch of a union
    complains and the one that got furthest, or at least liked the type, is the one that was meant."""
    faults = error.errors(include_url=False)
    first = faults[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"The body is not valid JSON: {first['msg']}")
    data = from_json(body)

    def meant(f: Any) -> tuple[int, bool]:
        return path_in(data, f["loc"]).count("["), not f["type"].endswith("_type")

    first = max((f for f in faults if f["loc"][:1] == first["loc"][:1]), key=meant)
    path = path_in(data, first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return InvalidRequest(f"Missing required parameter: '{path}'.", param=path)
    return InvalidRequest(f"Invalid value for '{path}': {message}." if path else f"{message}.", param=path or None)


def path_in(data: Any, location: tuple[int | str, ...]) -> str:
    """A pydantic location as a path in `data`: what names a branch of a union is not in the data and is left out."""
    path = ""
    last = len(location) - 1
    for i, part in enumerate(location):
        if isinstance(part, int) and isinstance(data, list) and part < len(data):
            path, data = f"{path}[{part}]", data[part]
        elif isinstance(part, str) and isinstance(data, dict) and (part in data or i == last):
            path, data = f"{path}.{part}" if path else part, data.get(part)
    return path
