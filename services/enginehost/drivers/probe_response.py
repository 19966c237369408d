"""What a probe's answer says: the generated text, or a fingerprint of an embedding."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from shared.errors import EngineFailed

_FINGERPRINT_NUMBERS = 8
_DIGITS = 3


def said(body: bytes) -> str:
    """Raises `EngineFailed` unless tokens were generated, or numbers computed."""
    try:
        message: Any = from_json(body)
        return _embedding(message["data"][0]["embedding"]) if "data" in message else _text(message)
    except (ValueError, KeyError, IndexError, TypeError) as e:
        raise EngineFailed(f"the engine answered without a token: {body[:200].decode(errors='replace')}") from e


def _text(message: Any) -> str:
    """The tokens may be special ones that show as nothing: then the count of them is the proof."""
    choice = message["choices"][0]
    text = choice["text"] if "text" in choice else (choice["message"].get("content") or "")
    made = (message.get("usage") or {}).get("completion_tokens", 0)
    if not text and not made and not choice.get("message", {}).get("reasoning_content"):
        raise EngineFailed("the engine answered without a token")
    return str(text)


def _embedding(vector: Any) -> str:
    if isinstance(vector, str):
        return vector[:64]
    return " ".join(f"{float(x):.{_DIGITS}g}" for x in vector[:_FINGERPRINT_NUMBERS])
