"""Server-sent events of a completion.

The work per chunk is minimal: constant bytes around the JSON string of its text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any

from services.gateway.http.error_formats import format_event
from services.gateway.http.responses.openai_objects import Delta, Head, chat_logprobs, completion_logprobs, usage
from services.gateway.http.responses.tool_deltas import ToolDeltas, ToolOptions
from services.gateway.requests.sink import Diverged
from shared.contracts.inference import Answered, InferStarted

DONE = b"data: [DONE]\n\n"


def comment(text: str) -> bytes:
    """Format a server-sent comment, which clients ignore."""
    return b": " + " ".join(text.splitlines()).encode() + b"\n\n"


class EventStream:
    """A sink that turns deltas into events, which `take` returns in one piece.

    A repeatable stream keeps the text it has sent. If the response starts again on another
    instance, its output must begin with that text, which is not sent twice.
    """

    streams = True

    def __init__(
        self,
        head: Head,
        *,
        include_usage: bool,
        token_ids: bool,
        logprobs: bool,
        is_repeatable: bool = False,
        tools: ToolOptions | None = None,
    ) -> None:
        """Create an empty stream.

        With `tools`, calls are divided from the text if the engine names their form.
        """
        self._chat = head.object == "chat.completion.chunk"
        self._head = head
        self._include_usage = include_usage
        self._token_ids = token_ids
        self._is_plain = not (token_ids or logprobs)
        self._out = bytearray()
        self._prefixes: dict[int, bytes] = {}
        self._offsets: dict[int, int] = {}
        self._prompt_ids: tuple[int, ...] | None = None
        self._first = True
        self._sent: dict[int, list[str]] = {}
        self._expected: dict[int, str] = {}
        self._finished: set[int] = set()
        self._tools = ToolDeltas(tools, head.id) if tools is not None else None
        self.is_repeatable = is_repeatable and self._is_plain
        self.before_done: Callable[[], bytes] | None = None
        """Returns bytes to write between the last event and `[DONE]`."""
        tail = '},"logprobs":null,"finish_reason":null}]' if self._chat else ',"logprobs":null,"finish_reason":null}]'
        self._suffix = (tail + (',"usage":null' if include_usage else "") + "}\n\n").encode()

    @property
    def pending(self) -> int:
        return len(self._out)

    def take(self) -> bytes:
        """Return the events since the last call."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def reset(self) -> None:
        """Expect the response from its beginning."""
        self._expected = {index: "".join(texts) for index, texts in self._sent.items()}
        self._sent = {index: [text] for index, text in self._expected.items()}

    def on_started(self, message: InferStarted) -> None:
        self._prompt_ids = message.prompt_token_ids
        if self._tools is not None:
            self._tools.on_started(message.tool_format)

    def chunk(self, choices: list[Delta]) -> None:
        if self.is_repeatable:
            choices = [new for delta in choices if (new := self._unsent(delta)) is not None]
        for delta in choices:
            index = delta.get("index", 0)
            prefix = self._prefixes.get(index)
            if prefix is None:
                prefix = self._open(index)
            if self._tools is not None and self._tools.is_active:
                delta = self._add_parsed(self._tools, index, delta)
            elif not self._is_plain:
                self._add_full(index, delta)
            elif text := delta.get("text"):
                self._out += prefix + encode_basestring(text).encode() + self._suffix
            if finish := delta.get("finish_reason"):
                self._finish(index, finish)

    def on_finished(self, message: Answered) -> None:
        if self._include_usage:
            self._out += format_event(self._head.fields() | {"choices": [], "usage": usage(message.usage)})
        if self.before_done is not None:
            self._out += self.before_done()
        self._out += DONE

    def _unsent(self, delta: Delta) -> Delta | None:
        """Return the part of a delta that has not been sent; None if there is none.

        Raises:
            Diverged: The delta differs from what was sent.
        """
        index, text = delta.get("index", 0), delta.get("text", "")
        if expected := self._expected.get(index, ""):
            common = min(len(expected), len(text))
            if expected[:common] != text[:common] or (delta.get("finish_reason") and common < len(expected)):
                raise Diverged("the regenerated text differs from the text that was sent")
            self._expected[index], text = expected[common:], text[common:]
        if delta.get("finish_reason"):
            if index in self._finished:
                return None
            self._finished.add(index)
        self._sent.setdefault(index, []).append(text)
        return delta | {"text": text}

    def _open(self, index: int) -> bytes:
        """Begin a choice, for chat with an event; return its constant prefix."""
        head = json.dumps(self._head.fields(), ensure_ascii=False, separators=(",", ":"))[:-1]
        if self._chat:
            self._emit(self._choice(index, {"role": "assistant", "content": "", "refusal": None}))
            prefix = f'data: {head},"choices":[{{"index":{index},"delta":{{"content":'
        else:
            prefix = f'data: {head},"choices":[{{"index":{index},"text":'
        self._prefixes[index] = prefix.encode()
        return self._prefixes[index]

    def _add_full(self, index: int, delta: Delta) -> None:
        """Add a delta with log-probabilities or token ids, which has no constant parts."""
        text, tokens, ids = delta.get("text", ""), delta.get("logprobs"), list(delta.get("token_ids", ()))
        if not (text or tokens or (ids and self._token_ids)):
            return
        choice = self._choice(index, {"content": text} if self._chat else text)
        if self._chat:
            choice["logprobs"] = chat_logprobs(tokens)
        else:
            choice["logprobs"], self._offsets[index] = completion_logprobs(tokens, self._offsets.get(index, 0))
        if self._token_ids:
            choice["token_ids"] = ids
        self._emit(choice)

    def _add_parsed(self, tools: ToolDeltas, index: int, delta: Delta) -> Delta:
        """Add the content and the tool calls of a delta.

        Returns the delta with the finish reason that clients get.
        """
        deltas, reason = tools.add(index, delta.get("text", ""), delta.get("finish_reason"))
        choices = [self._choice(index, content) for content in deltas]
        tokens, ids = delta.get("logprobs"), list(delta.get("token_ids", ())) if self._token_ids else []
        if not self._is_plain and (tokens or ids):
            choices = choices or [self._choice(index, {})]
            choices[0]["logprobs"] = chat_logprobs(tokens)
            if self._token_ids:
                choices[0]["token_ids"] = ids
        for choice in choices:
            self._emit(choice)
        return delta | {"finish_reason": reason}

    def _finish(self, index: int, reason: str) -> None:
        choice = self._choice(index, {} if self._chat else "")
        choice["finish_reason"] = reason
        self._emit(choice)

    def _choice(self, index: int, content: Any) -> dict[str, Any]:
        key = "delta" if self._chat else "text"
        return {"index": index, key: content, "logprobs": None, "finish_reason": None}

    def _emit(self, choice: dict[str, Any]) -> None:
        data = self._head.fields() | {"choices": [choice]}
        if self._first and self._token_ids:
            if self._chat:
                data["prompt_token_ids"] = self._prompt_ids
            else:
                choice["prompt_token_ids"] = self._prompt_ids
        self._first = False
        if self._include_usage:
            data["usage"] = None
        self._out += format_event(data)
