"""Probes of an engine, and the comparable content of a response: text, or a fingerprint."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pydantic_core import from_json

from services.enginehost.drivers.port import PROBE_TOKENS, Driver
from services.enginehost.http1 import Client, HttpError
from shared.errors import EngineFailed

_FINGERPRINT_NUMBERS = 8
_WITHIN_S = 60.0
_DIGITS = 3


class KeptOutput:
    """The output of an engine that those of later probes must equal."""

    def __init__(self, text: str | None = None) -> None:
        """Create it; without `text`, `keep` has the engine generate it."""
        self._text = text
        self._keeping: asyncio.Task[str] | None = None

    async def keep(self, driver: Driver, client: Client) -> None:
        """Have the engine generate the output, unless it is kept already; no request may run.

        After a cancellation it is still generated, and the next call uses it.

        Raises:
            EngineFailed: The engine generated no token.
        """
        if self._text is None:
            keeping = self._keeping
            if keeping is None or (keeping.done() and keeping.exception() is not None):
                keeping = self._keeping = asyncio.create_task(_generate_in_time(driver, client), name="output to keep")
            self._text = await asyncio.shield(keeping)

    async def compare(self, driver: Driver, client: Client) -> tuple[bool, float]:
        """Generate the output again.

        Returns:
            False if it differs from the kept one, and the duration in milliseconds.

        Raises:
            EngineFailed: The engine generated no token.
        """
        began = time.monotonic()
        found = await _generate_in_time(driver, client)
        return self._text in (None, found), (time.monotonic() - began) * 1e3


async def _generate_in_time(driver: Driver, client: Client) -> str:
    try:
        async with asyncio.timeout(_WITHIN_S):
            return await generated_output(driver, client)
    except TimeoutError as e:
        raise EngineFailed(f"The engine generated no token within {_WITHIN_S:g} s") from e


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
