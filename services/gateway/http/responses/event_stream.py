"""Server-sent events of a generation, made with the least work for each chunk: constant bytes around the JSON string of a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any

from services.gateway.http.error_formats import event
from services.gateway.http.responses.openai_objects import Delta, Head, chat_logprobs, completion_logprobs, usage
from services.gateway.requests.sink import Diverged
from shared.contracts.inference import Answered, InferStarted

DONE = b"data: [DONE]\n\n"


def comment(text: str) -> bytes:
    return b": " + text.replace("\n", " ").encode() + b"\n\n"


class EventStream:
    """A sink that turns deltas into events. What is made between two writes leaves in one (`take`).

    One that `repeats` keeps what it has said. When its answer begins again (another instance generates it), what comes must be the same
    so far, and is not said twice.
    """

    streams = True

    def __init__(self, head: Head, *, include_usage: bool, token_ids: bool, logprobs: bool, repeats: bool = False) -> None:
        self._chat = head.object == "chat.completion.chunk"
        self._head = head
        self._include_usage = include_usage
        self._token_ids = token_ids
        self._plain = not (token_ids or logprobs)
        self._out = bytearray()
        self._before: dict[int, bytes] = {}
        self._offsets: dict[int, int] = {}
        self._prompt_ids: tuple[int, ...] | None = None
        self._first = True
        self._said: dict[int, list[str]] = {}
        self._again: dict[int, str] = {}
        self._finished: set[int] = set()
        self.repeatable = repeats and self._plain
        self.before_done: Callable[[], bytes] | None = None
        """Makes what is written between the last event and [DONE]."""
        tail = '},"logprobs":null,"finish_reason":null}]' if self._chat else ',"logprobs":null,"finish_reason":null}]'
        self._after = (tail + (',"usage":null' if include_usage else "") + "}\n\n").encode()

    @property
    def pending(self) -> int:
        return len(self._out)

    def take(self) -> bytes:
        """All events since the last call."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def reset(self) -> None:
        """What comes is the answer from its beginning."""
        self._again = {index: "".join(texts) for index, texts in self._said.items()}
        self._said = {index: [text] for index, text in self._again.items()}

    def started(self, message: InferStarted) -> None:
        self._prompt_ids = message.prompt_token_ids

    def chunk(self, choices: list[Delta]) -> None:
        if self.repeatable:
            choices = [new for delta in choices if (new := self._unsaid(delta)) is not None]
        for delta in choices:
            index = delta.get("index", 0)
            before = self._before.get(index)
            if before is None:
                before = self._open(index)
            if not self._plain:
                self._full(index, delta)
            elif text := delta.get("text"):
                self._out += before + encode_basestring(text).encode() + self._after
            if finish := delta.get("finish_reason"):
                self._finish(index, finish)

    def finished(self, message: Answered) -> None:
        if self._include_usage:
            self._out += event(self._head.fields() | {"choices": [], "usage": usage(message.usage)})
        if self.before_done is not None:
            self._out += self.before_done()
        self._out += DONE

    def _unsaid(self, delta: Delta) -> Delta | None:
        """What of a delta the client has not got; None: nothing. Raises `Diverged`."""
        index, text = delta.get("index", 0), delta.get("text", "")
        if known := self._again.get(index, ""):
            both = min(len(known), len(text))
            if known[:both] != text[:both] or (delta.get("finish_reason") and both < len(known)):
                raise Diverged("generated again, it came out differently")
            self._again[index], text = known[both:], text[both:]
        if delta.get("finish_reason"):
            if index in self._finished:
                return None
            self._finished.add(index)
        self._said.setdefault(index, []).append(text)
        return delta | {"text": text}

    def _open(self, index: int) -> bytes:
        """The first of a choice: for chat an event that names the role."""
        head = json.dumps(self._head.fields(), ensure_ascii=False, separators=(",", ":"))[:-1]
        if self._chat:
            self._emit(self._choice(index, {"role": "assistant", "content": "", "refusal": None}))
            before = f'data: {head},"choices":[{{"index":{index},"delta":{{"content":'
        else:
            before = f'data: {head},"choices":[{{"index":{index},"text":'
        self._before[index] = before.encode()
        return self._before[index]

    def _full(self, index: int, delta: Delta) -> None:
        """A delta with log-probabilities or token ids: nothing is constant there."""
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
        self._out += event(data)
