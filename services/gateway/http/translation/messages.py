"""Responses of Anthropic's Messages API, made from chat completions.

Objects and the order of events as in the reference of `POST /v1/messages`.
"""

from __future__ import annotations

import json
from typing import Any

from services.gateway.http.error_formats import anthropic_error
from services.gateway.http.translation.chat_translator import Event, delta_of, first_choice, reasoning_of
from services.gateway.http.translation.messages_request import MessagesRequest
from shared.contracts.base import ErrorBody
from shared.errors import from_body

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class MessageTranslator:
    """Translate one chat completion to a message and its events.

    Args:
        message_id: The message's id, with the prefix `msg_`.
    """

    def __init__(self, request: MessagesRequest, message_id: str) -> None:
        self._request = request
        self._id = message_id
        self._has_started = False
        self._content: list[dict[str, Any]] = []
        self._kind: str | None = None
        self._texts: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._usage = {"input_tokens": 0, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0, "output_tokens": 0}

    def add(self, chunk: dict[str, Any]) -> list[Event]:
        if isinstance(usage := chunk.get("usage"), dict):
            self._read_usage(usage)
        events = self._start()
        choice = first_choice(chunk)
        if choice is None:
            return events
        delta = delta_of(choice)
        if reasoning := reasoning_of(delta):
            events += self._add_text("thinking", reasoning)
        if text := delta.get("content"):
            events += self._add_text("text", text)
        for position, call in enumerate(delta.get("tool_calls") or ()):
            events += self._add_call(call, call.get("index", position))
        if finish := choice.get("finish_reason"):
            self._stop_reason = _STOP_REASONS.get(finish, "end_turn")
            # vLLM reports the stop string that ended a completion.
            if finish == "stop" and choice.get("stop_reason") in (self._request.stop_sequences or ()):
                self._stop_reason, self._stop_sequence = "stop_sequence", choice["stop_reason"]
        return events

    def finish(self) -> list[Event]:
        if self._stop_reason is None:
            return self.fail(None, "The engine ended the response without a reason")
        events = [*self._start(), *self._close_text(), *self._close_calls()]
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return [*events, {"type": "message_delta", "delta": delta, "usage": dict(self._usage)}, {"type": "message_stop"}]

    def fail(self, code: str | None, message: str) -> list[Event]:
        status = from_body(ErrorBody(code=code or "", message=message)).status
        return [anthropic_error(status, message)]

    def body(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": list(self._content),
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": dict(self._usage),
        }

    def _read_usage(self, usage: dict[str, Any]) -> None:
        """Read the tokens of a completion: those read from a cache are not input tokens here."""
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self._usage["input_tokens"] = max(0, (usage.get("prompt_tokens") or 0) - cached)
        self._usage["cache_read_input_tokens"] = cached
        self._usage["output_tokens"] = usage.get("completion_tokens") or 0

    # Events.

    def _start(self) -> list[Event]:
        if self._has_started:
            return []
        self._has_started = True
        return [{"type": "message_start", "message": self.body()}, {"type": "ping"}]

    def _open(self, block: dict[str, Any]) -> Event:
        self._content.append(block)
        return {"type": "content_block_start", "index": len(self._content) - 1, "content_block": block}

    def _add_text(self, kind: str, text: str) -> list[Event]:
        events = []
        if self._kind != kind:
            events += [*self._close_text(), *self._close_calls()]
            self._kind = kind
            events.append(self._open({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})))
        self._texts.append(text)
        delta = {"type": f"{kind}_delta", kind: text}
        return [*events, {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}]

    def _close_text(self) -> list[Event]:
        kind, self._kind = self._kind, None
        if kind is None:
            return []
        self._content[-1] = self._content[-1] | {kind: "".join(self._texts)}
        self._texts = []
        return [{"type": "content_block_stop", "index": len(self._content) - 1}]

    def _add_call(self, call: dict[str, Any], index: int) -> list[Event]:
        """Add a delta of a call. Blocks do not overlap: a new call closes the previous one."""
        events, function = self._close_text(), call.get("function") or {}
        if index not in self._calls:
            events += self._close_calls()
            place = f"toolu_{self._id.removeprefix('msg_')}_{len(self._content)}"
            name = function.get("name") or ""
            self._calls[index] = {"arguments": "", "place": len(self._content)}
            events.append(self._open({"type": "tool_use", "id": call.get("id") or place, "name": name, "input": {}}))
        if arguments := function.get("arguments"):
            found = self._calls[index]
            if found.get("is_closed"):
                raise ValueError("deltas of several calls alternate")
            found["arguments"] += arguments
            delta = {"type": "input_json_delta", "partial_json": arguments}
            events.append({"type": "content_block_delta", "index": found["place"], "delta": delta})
        return events

    def _close_calls(self) -> list[Event]:
        """Close the open calls. Raises `ValueError` if the arguments of one are not JSON."""
        events: list[Event] = []
        for call in self._calls.values():
            if call.get("is_closed"):
                continue
            call["is_closed"] = True
            self._content[call["place"]] = self._content[call["place"]] | {"input": self._parse_arguments(call["arguments"])}
            events.append({"type": "content_block_stop", "index": call["place"]})
        return events

    def _parse_arguments(self, text: str) -> Any:
        try:
            return json.loads(text or "{}")
        except ValueError:
            if self._stop_reason != "max_tokens":
                raise
            return {}  # cut short
