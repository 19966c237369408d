"""Validation of JSON bodies, with errors in OpenAI's wording."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from shared.errors import InvalidRequest

M = TypeVar("M", bound=BaseModel)


def validate_body(kind: type[M], body: bytes) -> M:
    """Validate a JSON body; raise `InvalidRequest` with OpenAI's wording."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        raise to_invalid_request(e, body) from e


def to_invalid_request(error: ValidationError, body: bytes) -> InvalidRequest:
    """Convert a validation error to one error in OpenAI's wording.

    Every branch of a union reports an error. The deepest one of the first invalid field, or at
    least one whose type matched, is the branch that the client meant.
    """
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"The body is not valid JSON: {first['msg']}")
    data = from_json(body)

    def relevance(e: Any) -> tuple[int, bool]:
        return path_in(data, e["loc"]).count("["), not e["type"].endswith("_type")

    first = max((e for e in errors if e["loc"][:1] == first["loc"][:1]), key=relevance)
    path = path_in(data, first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return InvalidRequest(f"Missing required parameter: '{path}'.", param=path)
    return InvalidRequest(f"Invalid value for '{path}': {message}." if path else f"{message}.", param=path or None)


def path_in(data: Any, location: tuple[int | str, ...]) -> str:
    """Convert a pydantic location to a path in `data`, without branches of unions."""
    path = ""
    last = len(location) - 1
    for i, part in enumerate(location):
        if isinstance(part, int) and isinstance(data, list) and part < len(data):
            path, data = f"{path}[{part}]", data[part]
        elif isinstance(part, str) and isinstance(data, dict) and (part in data or i == last):
            path, data = f"{path}.{part}" if path else part, data.get(part)
    return path
