"""Probes of an engine, and the comparable content of a response: text, or a fingerprint."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from services.enginehost.drivers.port import PROBE_TOKENS, Driver
from services.enginehost.http1 import Client, HttpError
from shared.errors import EngineFailed

_FINGERPRINT_NUMBERS = 8
_DIGITS = 3


async def generated_output(driver: Driver, client: Client, tokens: int = PROBE_TOKENS) -> str:
    """Have the engine generate tokens, and return their comparable content.

    Raises:
        EngineFailed: The engine generated no token.
    """
    refusal = ""
    for request in driver.probes(tokens):
        try:
            status, body = await client.ask(request)
        except HttpError as e:
            raise EngineFailed(f"The engine generated no token: {e}") from e
        if 200 <= status < 300:
            return response_fingerprint(body)
        refusal = f"{request.path} answered {status}: {body[:300].decode(errors='replace')}"
        if status not in (400, 404, 405, 501):
            break
    raise EngineFailed(f"The engine generated no token: {refusal}")


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
