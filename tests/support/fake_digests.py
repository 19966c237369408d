"""Answers with the sizes and digests of a request's images, in the form of each API."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

ASKED = "Digests of the images?"
"""The text that asks for them. No other field passes through every API."""
_LONG_CHARS = 1024


def asks_for_digests(body: Any) -> bool:
    """True if a text of the request is `ASKED`."""
    return ASKED in _strings(body)


def digests(texts: list[str]) -> str:
    """Return the sizes and digests of texts, as JSON."""
    return json.dumps([[len(text), hashlib.sha256(text.encode()).hexdigest()] for text in texts])


def answer(path: str, body: Any) -> dict[str, Any]:
    """Return the response of a route to a whole request."""
    images = [text for text in _strings(body) if len(text) > _LONG_CHARS]
    text, usage = digests(images), {"input_tokens": 3, "output_tokens": 1, "total_tokens": 4}
    if path == "/v1/messages/count_tokens":
        return {"input_tokens": sum(map(len, images))}
    if path == "/v1/messages":
        content = [{"type": "text", "text": text}]
        message = {"id": "msg_x", "type": "message", "role": "assistant", "model": body["model"]}
        return message | {"content": content, "stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
    if path == "/v1/responses":
        parts = [{"type": "output_text", "text": text, "annotations": []}]
        output = [{"id": "msg_x", "type": "message", "role": "assistant", "status": "completed", "content": parts}]
        response = {"id": "resp_x", "object": "response", "created_at": 1, "model": body["model"], "status": "completed"}
        options: dict[str, Any] = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        return response | {"output": output, "usage": usage} | options
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"id": "x", "model": body["model"], "choices": [choice]}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
