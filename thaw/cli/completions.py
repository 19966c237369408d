"""Stream chat completions over HTTP for the command line: text, then figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from thaw.cli.api import Api
from thaw.cli.gateway import error_of
from thaw.errors import CommandError

Message = dict[str, str]
_SILENCE_S = 600.0


@dataclass
class Completion:
    """A finished stream: its figures. Times are milliseconds on this client's clock."""

    request_id: str = ""
    text: str = ""
    finish_reason: str | None = None
    ttft_ms: float | None = None
    duration_ms: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def document(self) -> dict[str, Any]:
        return vars(self)


def stream_chat(
    api: Api,
    model: str,
    messages: list[Message],
    completion: Completion,
    *,
    waiting: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Iterator[str]:
    """Yield the response's text as it arrives, and fill in `completion`.

    Args:
        waiting: Called with the gateway's messages while a model starts.

    Raises:
        CommandError: The request failed, or the stream ended with an error.
    """
    body = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}, **options}
    headers = {"authorization": f"Bearer {api.api_key}"} if api.api_key else {}
    began = time.monotonic()
    try:
        with (
            api.client(httpx.Timeout(_SILENCE_S, connect=3.0)) as client,
            client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response,
        ):
            completion.request_id = response.headers.get("x-request-id", "")
            if response.is_error:
                response.read()
                raise error_of(response.status_code, response.url.path, response.content)
            for event in _events(response.iter_lines(), waiting):
                text = _absorb(event, completion)
                if text:
                    if completion.ttft_ms is None:
                        completion.ttft_ms = (time.monotonic() - began) * 1e3
                    yield text
    except httpx.ConnectError as e:
        raise api.explain_unreachable(e) from e
    except httpx.HTTPError as e:
        raise CommandError(
            f"The stream broke off ({type(e).__name__}).", "`thaw logs gateway` says why; ask again.", code="stream_broken"
        ) from e
    finally:
        completion.duration_ms = (time.monotonic() - began) * 1e3


def _events(lines: Iterator[str], waiting: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Events of a server-sent stream up to [DONE]; a stream without one broke off."""
    for line in lines:
        if line.startswith(":"):
            waiting(line[1:].strip())
        elif line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            yield _parse_event(data)
    raise CommandError(
        "The stream ended in the middle of the answer.", "`thaw logs gateway` says why; ask again.", code="stream_broken"
    )


def _parse_event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if isinstance(event, dict):
        return event
    raise CommandError("The stream is not understood.", "Is THAW_URL a gateway of Thaw?", code="stream_broken")


def _absorb(event: dict[str, Any], completion: Completion) -> str:
    if error := event.get("error"):
        fields = error if isinstance(error, dict) else {}
        raise CommandError(
            str(fields.get("message") or error), "`thaw ps` and `thaw logs` say more.", code=str(fields.get("code") or "failed")
        )
    completion.usage = event.get("usage") or completion.usage
    text = ""
    for choice in event.get("choices") or ():
        text += (choice.get("delta") or {}).get("content") or ""
        completion.finish_reason = choice.get("finish_reason") or completion.finish_reason
    completion.text += text
    return text
