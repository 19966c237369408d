"""Errors of engines in the form of the API that the client speaks."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from services.gateway.http.error_formats import Dialect
from services.gateway.requests.passthrough import Relay
from shared.errors import EngineFailed, InvalidRequest, NotFound, ThawError

_LONGEST = 2000
"""Characters of an engine's words that are passed on."""


def relayed_error(relay: Relay, body: bytes, dialect: Dialect) -> dict[str, Any] | None:
    """The engine's error as the client's library reads it; None if `body` is no error or has that form already.

    FastAPI answers `{"detail": ...}`, Ollama `{"error": "words"}`, older vLLM `{"object": "error", "message": ...}`, and proxies HTML:
    clients print a bare status for each of them.
    """
    if relay.head.status < 400 or any(name.lower() == "content-encoding" for name in relay.head.headers):
        return None
    try:
        data = from_json(body)
    except ValueError:
        data = None
    error = data.get("error") if isinstance(data, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return None
    return dialect.body(_error(relay.head.status, _words(data, body)))


def _error(status: int, words: str) -> ThawError:
    kind = NotFound if status == 404 else InvalidRequest if status < 500 else EngineFailed
    return kind(f"The engine answered with status {status}: {words}")


def _words(data: Any, body: bytes) -> str:
    """What the engine said, as text."""
    if isinstance(data, dict):
        for name in ("error", "message", "detail"):
            if isinstance(value := data.get(name), str) and value:
                return value[:_LONGEST]
        if isinstance(faults := data.get("detail"), list):
            texts = [f"{'.'.join(map(str, f.get('loc', ())))}: {f.get('msg')}" for f in faults if isinstance(f, dict)]
            if texts:
                return "; ".join(texts)[:_LONGEST]
    return body[:_LONGEST].decode(errors="replace").strip() or "no text"
