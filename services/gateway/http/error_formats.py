"""Error formats of the served APIs, for bodies and for the end of a stream.

OpenAI: `{"error": {...}}`, also as an event, at which the clients raise.
Responses: the same body; in a stream `event: error` with the fields at the top level.
Messages: Anthropic's `{"type": "error", "error": {...}}`, and the same after `event: error`.
Ollama: `{"error": "text"}`, also as a line of a stream.
"""

from __future__ import annotations

from typing import Any, Protocol

from shared.compact_json import encode_json
from shared.errors import ThawError


class ErrorFormat(Protocol):
    """The format of errors in one API."""

    def body(self, error: ThawError) -> dict[str, Any]: ...
    def event(self, error: ThawError, number: int) -> bytes:
        """Format the event that follows `number` events of the stream."""


def format_event(data: Any, name: str = "") -> bytes:
    """Format a server-sent event."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + encode_json(data) + b"\n\n"


class OpenAI:
    """Chat completions, completions, embeddings, and every other route."""

    def body(self, error: ThawError) -> dict[str, Any]:
        return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}

    def event(self, error: ThawError, number: int) -> bytes:
        return format_event(self.body(error))


class Responses(OpenAI):
    """OpenAI's Responses API."""

    def event(self, error: ThawError, number: int) -> bytes:
        fields = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": number}
        return format_event({"type": "error"} | fields, "error")


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Build an error of Anthropic's API from its HTTP status."""
    other = "invalid_request_error" if status < 500 else "api_error"
    return {"type": "error", "error": {"type": _ANTHROPIC_TYPES.get(status, other), "message": message}}


class Anthropic:
    """Anthropic's Messages API."""

    def body(self, error: ThawError) -> dict[str, Any]:
        return anthropic_error(error.status, error.message)

    def event(self, error: ThawError, number: int) -> bytes:
        return format_event(self.body(error), "error")


class Ollama:
    """Ollama's API. Its streams are translated from events (`http/translation`)."""

    def body(self, error: ThawError) -> dict[str, Any]:
        return {"error": error.message}

    def event(self, error: ThawError, number: int) -> bytes:
        return format_event(self.body(error))


OPENAI = OpenAI()
OLLAMA_PREFIX = "/api/"
_RESPONSES, _ANTHROPIC, _OLLAMA = Responses(), Anthropic(), Ollama()


def error_format_of(path: str) -> ErrorFormat:
    """Return the error format of the API that a path belongs to."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return _ANTHROPIC
    if path == "/v1/responses" or path.startswith("/v1/responses/"):
        return _RESPONSES
    return _OLLAMA if path.startswith(OLLAMA_PREFIX) else OPENAI
