"""Responses in OpenAI's form, translated to Ollama's: events to lines, a body to one object.

Durations are nanoseconds. `load_duration` is the time until the engine began with the prompt (the
queue, and a cold start), `prompt_eval_duration` the time from there to the first token, and
`eval_duration` the rest.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from services.gateway.http.parsing.cooperative import TimeSlice
from services.gateway.http.translation.chat_stream import ChatStreamDecoder, Comment, Decoded, Done, StreamError
from services.gateway.http.translation.chat_translator import delta_of, first_choice, reasoning_of
from services.gateway.http.translation.ollama_requests import OllamaReply
from services.gateway.http.translation.vectors import normalize, vector_of
from shared.compact_json import encode_json

_PREFILL = re.compile(r"\bprefill;dur=([0-9.]+)")
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError)
"""Exceptions of translating a malformed response."""
_MALFORMED_TEXT = "The engine sent a malformed response"
_DONE_REASONS = {"tool_calls": "stop", "function_call": "stop"}
"""Ollama ends a message with tool calls like any other."""
_BAD_ARGUMENTS = "The model called a tool with arguments that are not a JSON object"


def timestamp(seconds: float) -> str:
    """Format Unix time as Ollama does, in RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def error_text(body: Any, status: int) -> str:
    """Extract the message of an error in OpenAI's form, or in an engine's."""
    error = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail")
    return error if isinstance(error, str) and error else f"The engine answered with status {status}"


class Durations:
    """The times of one response, on the monotonic clock."""

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._first_token_at: float | None = None
        self._prefill_s: float | None = None

    def read(self, server_timing: str) -> None:
        """Take the time of prefill from a Server-Timing header."""
        if (match := _PREFILL.search(server_timing)) is not None:
            self._prefill_s = float(match[1]) / 1e3

    def first_token(self, now: float) -> None:
        if self._first_token_at is None:
            self._first_token_at = now

    def fields(self, usage: dict[str, Any], now: float) -> dict[str, int]:
        """Build the durations and token counts of the last object.

        Without a measured prefill, or without events, `prompt_eval_duration` has all the time
        until the first token, or is left out.
        """
        total_s = now - self._started_at
        fields = {"total_duration": _ns(total_s), "load_duration": 0, "prompt_eval_count": usage.get("prompt_tokens") or 0}
        first_s = self._first_token_at - self._started_at if self._first_token_at is not None else None
        if first_s is not None:
            prefill_s = min(self._prefill_s if self._prefill_s is not None else first_s, first_s)
            fields["load_duration"] = _ns(first_s - prefill_s)
            fields["prompt_eval_duration"] = _ns(prefill_s)
        fields["eval_count"] = usage.get("completion_tokens") or 0
        if first_s is not None:
            fields["eval_duration"] = max(1, _ns(total_s - first_s))  # clients divide tokens by it
            parts = fields["load_duration"] + fields["prompt_eval_duration"] + fields["eval_duration"]
            fields["total_duration"] = max(fields["total_duration"], parts)
        return fields


class _ToolCalls:
    """Tool calls, collected from their deltas: Ollama sends each in one piece."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[str, str]] = {}

    def add(self, deltas: list[dict[str, Any]]) -> None:
        for position, delta in enumerate(deltas):
            call = self._calls.setdefault(delta.get("index", position), {"id": "", "name": "", "arguments": ""})
            call["id"] = delta.get("id") or call["id"]
            function = delta.get("function") or {}
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""

    def take(self) -> list[dict[str, Any]]:
        """Return the calls.

        Raises:
            ValueError: The arguments of one are not a JSON object.
        """
        calls = []
        for index, call in sorted(self._calls.items()):
            arguments = json.loads(call["arguments"] or "{}")
            if not isinstance(arguments, dict):
                raise ValueError(_BAD_ARGUMENTS)
            calls.append({"id": call["id"], "function": {"index": index, "name": call["name"], "arguments": arguments}})
        self._calls.clear()
        return calls


class OllamaTranslator:
    """Translate one response.

    Args:
        reply: The facts of the request.
        started_at: Arrival of the request, on the monotonic clock.
    """

    content_type = "application/x-ndjson"

    def __init__(self, reply: OllamaReply, started_at: float) -> None:
        self._reply = reply
        self._durations = Durations(started_at)
        self._decoder = ChatStreamDecoder()
        self._tools = _ToolCalls()
        self._usage: dict[str, Any] = {}
        self._finish_reason = "stop"
        self.is_done = False

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the options without effect."""
        return self._reply.ignored

    def on_headers(self, server_timing: str) -> None:
        self._durations.read(server_timing)

    # Streams.

    def feed(self, data: bytes, now: float) -> bytes:
        """Translate the next bytes of an event stream. Bytes after its end are dropped."""
        out = bytearray()
        try:
            for decoded in self._decoder.feed(data):
                if self.is_done:
                    break
                for item in self._translate(decoded, now):
                    out += _line(item)
        except MALFORMED:
            self.is_done = True
            out += _line({"error": _MALFORMED_TEXT})
        return bytes(out)

    async def end(self, now: float) -> bytes:
        """Return what follows the last event: nothing, unless the stream broke off."""
        if self.is_done:
            return b""
        self.is_done = True
        return _line({"error": "The response broke off"})

    def _translate(self, decoded: Decoded, now: float) -> Iterator[dict[str, Any]]:
        if isinstance(decoded, Comment):
            return
        if isinstance(decoded, StreamError):
            self.is_done = True
            yield {"error": decoded.message}
        elif isinstance(decoded, Done):
            yield from self._finish(now)
        else:
            self._usage = decoded.get("usage") or self._usage
            if (choice := first_choice(decoded)) is not None:
                yield from self._delta(choice, now)

    def _delta(self, choice: dict[str, Any], now: float) -> Iterator[dict[str, Any]]:
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        delta = delta_of(choice) or {"content": choice.get("text")}
        self._tools.add(delta.get("tool_calls") or [])
        text, thinking = delta.get("content") or "", reasoning_of(delta)
        logprobs = _logprobs(choice)
        if text or thinking or logprobs or delta.get("tool_calls"):
            self._durations.first_token(now)
        if text or thinking or logprobs:
            yield self._object(text, thinking, done=False) | ({"logprobs": logprobs} if logprobs else {})

    def _finish(self, now: float) -> Iterator[dict[str, Any]]:
        self.is_done = True
        try:
            calls = self._tools.take()
        except ValueError:
            yield {"error": _BAD_ARGUMENTS}
            return
        if calls:
            yield self._object("", "", done=False, tool_calls=calls)
        yield self._object("", "", done=True) | self._ending(now)

    # Whole bodies.

    async def translate_body(self, status: int, body: bytes, now: float) -> tuple[int, dict[str, Any]]:
        """Translate a whole body. Returns the status and the object."""
        try:
            data = json.loads(body)
        except ValueError:
            data = None
        if status >= 400 or not isinstance(data, dict):
            return (status if status >= 400 else 502), {"error": error_text(data, status)}
        try:
            return await self._translate_answer(data, now)
        except MALFORMED:
            return 502, {"error": _MALFORMED_TEXT}

    async def _translate_answer(self, data: dict[str, Any], now: float) -> tuple[int, dict[str, Any]]:
        self._usage = data.get("usage") or {}
        if self._reply.kind == "embed":
            return 200, await self._embed(data, now)
        if self._reply.kind == "embeddings":
            return 200, {"embedding": [] if self._reply.is_load else list(vector_of(data["data"][0]["embedding"]))}
        if self._reply.is_load:
            return 200, self._object("", "", done=True) | {"done_reason": "load"}
        return self._completion(data, now)

    def _completion(self, data: dict[str, Any], now: float) -> tuple[int, dict[str, Any]]:
        choice = first_choice(data) or {}
        message = delta_of(choice) or {"content": choice.get("text")}
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        self._tools.add(message.get("tool_calls") or [])
        try:
            calls = self._tools.take()
        except ValueError:
            return 502, {"error": _BAD_ARGUMENTS}
        whole = self._object(message.get("content") or "", reasoning_of(message), done=True, tool_calls=calls)
        if logprobs := _logprobs(choice):
            whole["logprobs"] = logprobs
        return 200, whole | self._ending(now)

    async def _embed(self, data: dict[str, Any], now: float) -> dict[str, Any]:
        """Build the response of /api/embed: vectors of length 1, as Ollama's are."""
        vectors: list[list[float]] = []
        time_slice = TimeSlice()
        for item in () if self._reply.is_load else data["data"]:
            vectors.append(normalize(vector_of(item["embedding"])))
            await time_slice.pause()
        fields = self._durations.fields(self._usage, now)
        del fields["eval_count"]
        return {"model": self._reply.model, "embeddings": vectors} | fields

    # Objects.

    def _ending(self, now: float) -> dict[str, Any]:
        reason = _DONE_REASONS.get(self._finish_reason, self._finish_reason)
        return {"done_reason": reason} | self._durations.fields(self._usage, now)

    def _object(self, text: str, thinking: str, *, done: bool, tool_calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        head: dict[str, Any] = {"model": self._reply.model, "created_at": timestamp(time.time())}
        if self._reply.kind == "chat":
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if thinking:
                message["thinking"] = thinking
            if tool_calls:
                message["tool_calls"] = tool_calls
            head["message"] = message
        else:
            head["response"] = text
            if thinking:
                head["thinking"] = thinking
        return head | {"done": done}


def _logprobs(choice: dict[str, Any]) -> list[dict[str, Any]]:
    given = choice.get("logprobs")
    if not given:
        return []
    if (content := given.get("content")) is not None:
        return list(content)
    top = given.get("top_logprobs") or [None] * len(given.get("tokens") or ())
    return [
        {"token": token, "logprob": logprob, "top_logprobs": [{"token": t, "logprob": p} for t, p in (others or {}).items()]}
        for token, logprob, others in zip(given.get("tokens") or (), given.get("token_logprobs") or (), top, strict=False)
    ]


def _line(data: dict[str, Any]) -> bytes:
    return encode_json(data) + b"\n"


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
