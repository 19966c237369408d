"""Conversion of engines' errors to the form of the API that the client uses."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from services.gateway.http.error_formats import ErrorFormat
from services.gateway.requests.passthrough import PassthroughResponse
from shared.errors import EngineFailed, InvalidRequest, NotFound, ThawError

_MAX_TEXT_CHARS = 2000
"""Length of an engine's error text that is passed on."""


def convert_error(passthrough: PassthroughResponse, body: bytes, error_format: ErrorFormat) -> dict[str, Any] | None:
    """Convert an engine's error to one that the client's library can parse.

    FastAPI sends `{"detail": ...}`, Ollama `{"error": "text"}`, older vLLM `{"object": "error",
    "message": ...}`, and proxies HTML. Clients print a bare status for each of them.

    Returns:
        The body, or None if `body` is not an error or has the right form already.
    """
    if passthrough.head.status < 400 or any(name.lower() == "content-encoding" for name in passthrough.head.headers):
        return None
    try:
        data = from_json(body)
    except ValueError:
        data = None
    error = data.get("error") if isinstance(data, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return None
    return error_format.body(_error(passthrough.head.status, _text_of(data, body)))


def _error(status: int, text: str) -> ThawError:
    kind = NotFound if status == 404 else InvalidRequest if status < 500 else EngineFailed
    return kind(f"The engine answered with status {status}: {text}")


def _text_of(data: Any, body: bytes) -> str:
    """Extract the text of an error."""
    if isinstance(data, dict):
        for name in ("error", "message", "detail"):
            if isinstance(value := data.get(name), str) and value:
                return value[:_MAX_TEXT_CHARS]
        if isinstance(faults := data.get("detail"), list):
            texts = [f"{'.'.join(map(str, f.get('loc', ())))}: {f.get('msg')}" for f in faults if isinstance(f, dict)]
            if texts:
                return "; ".join(texts)[:_MAX_TEXT_CHARS]
    return body[:_MAX_TEXT_CHARS].decode(errors="replace").strip() or "no text"
