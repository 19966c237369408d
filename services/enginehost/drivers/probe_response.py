"""Comparable content of a probe's response: text, or a fingerprint."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from shared.errors import EngineFailed

_FINGERPRINT_NUMBERS = 8
_DIGITS = 3


def response_fingerprint(body: bytes) -> str:
    """Extract the content.

    Raises `EngineFailed` unless tokens or numbers were generated.
    """
    try:
        message: Any = from_json(body)
        return _embedding(message["data"][0]["embedding"]) if "data" in message else _text(message)
    except (ValueError, KeyError, IndexError, TypeError) as e:
        raise EngineFailed(f"The engine answered without a token: {body[:200].decode(errors='replace')}") from e


def _text(message: Any) -> str:
    """Return the generated text.

    It is empty if all tokens are special; then the usage shows that tokens were generated.
    """
    choice = message["choices"][0]
    text = choice["text"] if "text" in choice else (choice["message"].get("content") or "")
    made = (message.get("usage") or {}).get("completion_tokens", 0)
    if not text and not made and not choice.get("message", {}).get("reasoning_content"):
        raise EngineFailed("The engine answered without a token")
    return str(text)


def _embedding(vector: Any) -> str:
    if isinstance(vector, str):
        return vector[:64]
    return " ".join(f"{float(x):.{_DIGITS}g}" for x in vector[:_FINGERPRINT_NUMBERS])
