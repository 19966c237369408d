"""Sinks of responses that are sent as one JSON body: completions and embeddings."""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass, field
from typing import Any

from services.gateway.http.responses.openai_objects import Delta, Head, chat_logprobs, completion_logprobs, usage
from services.gateway.http.responses.sliced_json import encode_in_slices
from services.gateway.http.responses.tool_deltas import ToolDeltas, ToolOptions
from shared.compact_json import encode_json
from shared.contracts.inference import Answered, EmbeddingsFinished, InferStarted


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.get("text", ""))
        self.token_ids.extend(delta.get("token_ids", ()))
        if (more := delta.get("logprobs")) is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += more
        self.finish_reason = delta.get("finish_reason") or self.finish_reason


class _Buffered:
    """A sink that sends nothing early, so that the response can always start again."""

    pending = 0
    streams = False
    is_repeatable = True


class BufferedCompletion(_Buffered):
    """A chat or text completion."""

    def __init__(self, head: Head, choices: int, token_ids: bool, tools: ToolOptions | None = None) -> None:
        self._head = head
        self._tools = tools
        self._tool_format: str | None = None
        self._count = choices
        self._token_ids = token_ids
        self._prompt_ids: tuple[int, ...] | None = None
        self._usage: dict[str, Any] = {}
        self.reset()

    def reset(self) -> None:
        """Discard the output."""
        self._choices = {i: _Choice() for i in range(self._count)}

    def on_started(self, message: InferStarted) -> None:
        self._prompt_ids = message.prompt_token_ids
        self._tool_format = message.tool_format or self._tool_format

    def chunk(self, choices: list[Delta]) -> None:
        for delta in choices:
            self._choices.setdefault(delta.get("index", 0), _Choice()).add(delta)

    def on_finished(self, message: Answered) -> None:
        self._usage = usage(message.usage)

    async def encode(self) -> bytes:
        """Encode the body."""
        return encode_json(await self.body())

    async def body(self) -> dict[str, Any]:
        """Build the body. Long texts are searched for tool calls in time slices."""
        make = self._chat if self._head.object == "chat.completion" else self._completion
        body = self._head.fields() | {"choices": [await make(i, c) for i, c in sorted(self._choices.items())], "usage": self._usage}
        if self._token_ids and self._head.object == "chat.completion":
            body["prompt_token_ids"] = self._prompt_ids
        return body

    async def _chat(self, index: int, choice: _Choice) -> dict[str, Any]:
        content: dict[str, Any] = {"content": "".join(choice.text)}
        reason = choice.finish_reason or "stop"
        tools = ToolDeltas(self._tools, self._head.id) if self._tools is not None else None
        if tools is not None:
            tools.on_started(self._tool_format)
        if tools is not None and tools.is_active:
            content, reason = await tools.message(index, content["content"], reason)
        shape: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant"} | content | {"refusal": None, "annotations": []},
            "logprobs": chat_logprobs(choice.logprobs),
            "finish_reason": reason,
        }
        return shape | {"token_ids": choice.token_ids} if self._token_ids else shape

    async def _completion(self, index: int, choice: _Choice) -> dict[str, Any]:
        shape: dict[str, Any] = {
            "text": "".join(choice.text),
            "index": index,
            "logprobs": completion_logprobs(choice.logprobs, 0)[0],
            "finish_reason": choice.finish_reason or "stop",
        }
        return shape | {"token_ids": choice.token_ids, "prompt_token_ids": self._prompt_ids} if self._token_ids else shape


class BufferedEmbeddings(_Buffered):
    """Vectors, as base64 or as numbers."""

    def __init__(self, model: str, as_floats: bool) -> None:
        self._model = model
        self._as_floats = as_floats
        self._last: EmbeddingsFinished | None = None

    def reset(self) -> None:
        """No-op: vectors arrive in one message."""

    def on_started(self, message: InferStarted) -> None:
        """No-op: the response shows nothing of it."""

    def chunk(self, choices: list[Delta]) -> None:
        raise ValueError("embeddings have no chunks")

    def on_finished(self, message: Answered) -> None:
        if not isinstance(message, EmbeddingsFinished):
            raise ValueError("an embedding request ended without vectors")
        self._last = message

    async def encode(self) -> bytes:
        """Encode the body, vector by vector: thousands of them take a second as numbers."""
        if self._last is None:
            raise ValueError("not finished")
        vectors = enumerate(self._last.vectors)
        return await encode_in_slices(
            {
                "object": "list",
                "data": (
                    {"object": "embedding", "index": i, "embedding": _floats(v) if self._as_floats else v} for i, v in vectors
                ),
                "model": self._model,
                "usage": {"prompt_tokens": self._last.usage.prompt_tokens, "total_tokens": self._last.usage.prompt_tokens},
            }
        )


class PassthroughOnly(_Buffered):
    """The response of a route that only an engine understands: the engine must answer in HTTP."""

    def reset(self) -> None:
        """No-op: nothing is kept here."""

    def on_started(self, message: InferStarted) -> None:
        """No-op: the response shows nothing of it."""

    def chunk(self, choices: list[Delta]) -> None:
        raise ValueError("a response of this route has no tokens")

    def on_finished(self, message: Answered) -> None:
        raise ValueError("the request ended without a response")

    async def encode(self) -> bytes:
        raise ValueError("there is no body")


BufferedSink = BufferedCompletion | BufferedEmbeddings | PassthroughOnly


def _floats(vector: str) -> list[float]:
    raw = base64.b64decode(vector)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))
