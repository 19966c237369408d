"""Responses of OpenAI's Responses API, made from chat completions.

Objects and the order of events as in the reference of `POST /v1/responses`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.gateway.http.translation.chat_translator import Event, delta_of, first_choice, reasoning_of
from services.gateway.http.translation.responses_request import ResponsesRequest

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_FUNCTION = {"type": "function", "description": None, "parameters": None, "strict": None}


@dataclass(slots=True)
class _Text:
    """A message of the assistant, or its reasoning, while it grows."""

    id: str
    index: int
    is_reasoning: bool
    parts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        text = "".join(self.parts)
        if self.is_reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}

    def item(self, status: str) -> dict[str, Any]:
        content = [self.part()] if status != "in_progress" else []
        if self.is_reasoning:
            return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


@dataclass(slots=True)
class _Call:
    """A call of a function, while it grows."""

    id: str
    index: int
    call_id: str
    name: str
    parts: list[str] = field(default_factory=list)

    def item(self, status: str) -> dict[str, Any]:
        fields = {"call_id": self.call_id, "name": self.name, "arguments": "".join(self.parts)}
        return {"id": self.id, "type": "function_call", "status": status} | fields


class ResponseTranslator:
    """Translate one chat completion to a response and its events.

    Args:
        response_id: The response's id, with the prefix `resp_`.
        created_at: Unix time of the response in seconds.
        is_stored: The response will be stored.
    """

    def __init__(self, request: ResponsesRequest, response_id: str, created_at: int, *, is_stored: bool) -> None:
        self._request = request
        self._id = response_id
        self._suffix = response_id.removeprefix("resp_")
        self._created_at = created_at
        self._sequence = 0
        self._has_started = False
        self._output: list[dict[str, Any]] = []
        self._text: _Text | None = None
        self._calls: dict[int, _Call] = {}
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] | None = None
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._is_stored = is_stored
        self._last: Event = {}

    def add(self, chunk: dict[str, Any]) -> list[Event]:
        if not self._has_started and isinstance(created := chunk.get("created"), int):
            self._created_at = created  # that of the first attempt, if this is a repetition
        events = self._start()
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = _usage(usage)
        choice = first_choice(chunk)
        if choice is None:
            return events
        delta = delta_of(choice)
        if reasoning := reasoning_of(delta):
            events += self._add_text(reasoning, [], is_reasoning=True)
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        if (text := delta.get("content")) or logprobs:
            events += self._add_text(text or "", logprobs, is_reasoning=False)
        for position, call in enumerate(delta.get("tool_calls") or ()):
            events += self._add_call(call, call.get("index", position))
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return events

    def finish(self) -> list[Event]:
        if self._finish_reason is None:
            return self.fail(None, "The engine ended the response without a reason")
        events = self._start()
        if not self._output:
            events += self._open_text(is_reasoning=False)
        reason = _INCOMPLETE.get(self._finish_reason)
        self._status = "completed" if reason is None else "incomplete"
        events += [*self._close_text(), *self._close_calls()]
        self._last = self._event(f"response.{self._status}", response=self.body())
        return [*events, self._last]

    def fail(self, code: str | None, message: str) -> list[Event]:
        events = self._start()
        self._is_stored, self._status, self._error = False, "failed", {"code": code or "server_error", "message": message}
        self._last = self._event("response.failed", response=self.body())
        return [*events, self._last]

    def body(self) -> dict[str, Any]:
        request = self._request
        reason = _INCOMPLETE.get(self._finish_reason or "") if self._status == "incomplete" else None
        text = request.text.model_dump(exclude_none=True) if request.text is not None else {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": {"reason": reason} if reason is not None else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": list(self._output),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None} | (request.reasoning or {}),
            "service_tier": "default",
            "store": self._is_stored,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": request.tool_choice if request.tool_choice is not None else "auto",
            "tools": [_FUNCTION | tool for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": self._usage,
            "user": request.user,
        }

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items of the output."""
        return list(self._output)

    @property
    def is_storable(self) -> bool:
        """True if the response is to be stored, and did not fail."""
        return self._is_stored and self._status in ("completed", "incomplete")

    def note_not_stored(self) -> None:
        """Have the finished response and its last event report that it was not stored."""
        self._is_stored = self._last["response"]["store"] = False

    # Events.

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence} | fields
        self._sequence += 1
        return event

    def _start(self) -> list[Event]:
        if self._has_started:
            return []
        self._has_started = True
        return [self._event(f"response.{kind}", response=self.body()) for kind in ("created", "in_progress")]

    def _open(self, item: dict[str, Any]) -> Event:
        self._output.append(item)
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _close(self, index: int, item: dict[str, Any]) -> Event:
        self._output[index] = item
        return self._event("response.output_item.done", output_index=index, item=item)

    def _closed_status(self) -> str:
        return "incomplete" if self._finish_reason in _INCOMPLETE else "completed"

    # Texts.

    def _add_text(self, text: str, logprobs: list[dict[str, Any]], *, is_reasoning: bool) -> list[Event]:
        events = self._open_text(is_reasoning=is_reasoning)
        assert self._text is not None
        self._text.parts.append(text)
        self._text.logprobs += logprobs
        if is_reasoning:
            return [*events, self._part_event("response.reasoning_text.delta", self._text, delta=text)]
        return [*events, self._part_event("response.output_text.delta", self._text, delta=text, logprobs=logprobs)]

    def _open_text(self, *, is_reasoning: bool) -> list[Event]:
        if self._text is not None and self._text.is_reasoning == is_reasoning:
            return []
        events, index = self._close_text(), len(self._output)
        self._text = _Text(f"{'rs' if is_reasoning else 'msg'}_{self._suffix}_{index}", index, is_reasoning)
        events.append(self._open(self._text.item("in_progress")))
        return [*events, self._part_event("response.content_part.added", self._text, part=self._text.part())]

    def _close_text(self) -> list[Event]:
        text, self._text = self._text, None
        if text is None:
            return []
        part = text.part()
        if text.is_reasoning:
            done = self._part_event("response.reasoning_text.done", text, text=part["text"])
        else:
            done = self._part_event("response.output_text.done", text, text=part["text"], logprobs=text.logprobs)
        closed = self._part_event("response.content_part.done", text, part=part)
        return [done, closed, self._close(text.index, text.item(self._closed_status()))]

    def _part_event(self, kind: str, item: _Text, **fields: Any) -> Event:
        return self._event(kind, item_id=item.id, output_index=item.index, content_index=0, **fields)

    # Calls.

    def _add_call(self, call: dict[str, Any], index: int) -> list[Event]:
        function, events = call.get("function") or {}, self._close_text()
        found = self._calls.get(index)
        if found is None:
            place = len(self._output)
            call_id = call.get("id") or f"call_{self._suffix}_{place}"
            found = self._calls[index] = _Call(f"fc_{self._suffix}_{place}", place, call_id, function.get("name") or "")
            events.append(self._open(found.item("in_progress")))
        if arguments := function.get("arguments"):
            found.parts.append(arguments)
            delta = self._event(
                "response.function_call_arguments.delta", item_id=found.id, output_index=found.index, delta=arguments
            )
            events.append(delta)
        return events

    def _close_calls(self) -> list[Event]:
        events = []
        for call in self._calls.values():
            item = call.item(self._closed_status())
            fields = {"item_id": call.id, "output_index": call.index, "name": call.name, "arguments": item["arguments"]}
            events += [self._event("response.function_call_arguments.done", **fields), self._close(call.index, item)]
        self._calls = {}
        return events


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    given, made = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": given + made,
    }
