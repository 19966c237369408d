"""Contract of the APIs that are served by translation to chat completions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from services.gateway.http.error_formats import format_event
from shared.errors import InvalidRequest

_IMAGE_TYPE = re.compile(r"image/[a-z0-9][a-z0-9.+-]{0,63}", re.IGNORECASE)
Event = dict[str, Any]
"""An event of a stream; `type` is its name."""


@dataclass(frozen=True)
class ClientRequest:
    """A request of another API, from which a chat completion was translated.

    Attributes:
        request: The validated request.
        items: The conversation up to this request, in the API's own form; empty if the API keeps
            none.
    """

    request: BaseModel
    items: tuple[dict[str, Any], ...] = ()


class ChatTranslator(Protocol):
    """Translate one chat completion to the response of another API.

    A stream is `add` for every chunk, then `finish` or `fail`. Each returns the events to send.
    """

    def add(self, chunk: dict[str, Any]) -> list[Event]:
        """Translate a chunk, or a whole completion, whose messages are read as deltas."""

    def finish(self) -> list[Event]:
        """End the response."""

    def fail(self, code: str | None, message: str) -> list[Event]:
        """End a stream that broke off."""

    def body(self) -> dict[str, Any]:
        """Return the whole response, once it is finished."""


def format_events(events: list[Event]) -> bytes:
    """Format events as server-sent events that are named by their type."""
    return b"".join(format_event(event, event["type"]) for event in events)


def delta_of(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the delta of a streamed choice, or the message of a whole one."""
    delta = choice.get("delta") or choice.get("message") or {}
    return delta if isinstance(delta, dict) else {}


def first_choice(chunk: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first choice of a chunk; None if it has none, as the chunk of the usage."""
    choices = chunk.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None


def reasoning_of(delta: dict[str, Any]) -> str:
    """Return the reasoning in a delta: `reasoning_content`, or `reasoning` in newer engines."""
    text = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return text if isinstance(text, str) else ""


def require_text(value: Any, param: str) -> str:
    """Return a string of the request. Raises `InvalidRequest` for anything else."""
    if not isinstance(value, str):
        raise InvalidRequest(f"Invalid value for '{param}': a string is required.", param=param)
    return value


def image_url_of(media_type: str, data: str, param: str) -> str:
    """Return the data URL of an image in base64.

    Only the beginning of `data` may be present: of a body in a file, markers stand for the rest.

    Raises:
        InvalidRequest: The media type is not that of an image.
    """
    if not _IMAGE_TYPE.fullmatch(media_type):
        raise InvalidRequest(f"Invalid value for '{param}': a type such as image/png is required.", param=param)
    return f"data:{media_type};base64,{data}"


def contents_of(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return content parts as a message has them: a single text as a string."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
