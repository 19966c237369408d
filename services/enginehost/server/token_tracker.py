"""A streamed answer whose tokens are followed, so that another engine can go on with it: events in, the client's bytes and the tokens out.

The engine is asked to tell its token ids. They are taken out again before the client gets the event, and travel beside the bytes as
`InferData.progress`. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic_core import from_json

from services.enginehost.drivers.port import Driver
from services.enginehost.drivers.token_api import TokenApi, Told
from services.enginehost.server.usage_meter import usage_of
from shared.contracts.inference import ChoiceDelta, FinishReason, Usage

_EVENT_END = re.compile(rb"\r?\n\r?\n")
_REASONS = frozenset(get_args(FinishReason))
_HEAD = ("id", "created", "model", "system_fingerprint")
_FIXING = {
    "tools": "tools are called",
    "functions": "tools are called",
    "logprobs": "log-probabilities of two engines have two forms",
    "top_logprobs": "log-probabilities of two engines have two forms",
    "prompt_logprobs": "log-probabilities of two engines have two forms",
    "echo": "the prompt is echoed",
    "suffix": "it fills in between two texts",
    "presence_penalty": "penalties count what was generated here only",
    "frequency_penalty": "penalties count what was generated here only",
    "structured_outputs": "its grammar would begin anew",
    "use_beam_search": "beams cannot be told by their tokens",
    "kv_transfer_params": "its keys and values come from elsewhere",
    "truncate_prompt_tokens": "the prompt is truncated",
}
"""Fields of a request that make its answer one that only its engine can end, if they are said and not nothing."""


def fixed_at(driver: Driver, endpoint: str, body: Mapping[str, Any]) -> str:
    """Why nobody else could go on with an engine's answer; empty: somebody could."""
    if driver.tokens is None:
        return f"{driver.card.spec.engine} does not tell its tokens, or takes none"
    return fixed_of(endpoint, body, driver.card.spec.engine_args, driver.tokens)


def fixed_of(endpoint: str, body: Mapping[str, Any], engine_args: Mapping[str, Any], api: TokenApi) -> str:
    """Why nobody else could go on with the answer; empty: somebody could."""
    if endpoint not in ("chat", "completion"):
        return "only chats and completions are followed by their tokens"
    if unfollowed := api.unfollowed(endpoint):
        return unfollowed
    if not body.get("stream"):
        return "it is answered whole: another engine can make it anew"
    for name, why in {**_FIXING, **api.fixing}.items():
        if body.get(name):
            return f"{name}: {why}"
    if any(isinstance(n := body.get(name), int) and n > 1 for name in ("n", "best_of")):
        return "n: several choices of a hosted engine are not followed"
    if (body.get("response_format") or {}).get("type", "text") != "text" or any(k.startswith("guided_") for k in body):
        return "response_format: its grammar would begin anew"
    if endpoint == "chat":
        if engine_args.get("reasoning_parser"):
            return "reasoning_parser: what it has understood is in its engine only"
        messages = body.get("messages")
        if not isinstance(messages, list) or any(isinstance(m, dict) and isinstance(m.get("content"), list) for m in messages):
            return "messages: parts that are not plain text are not followed"
        return ""
    prompt = body.get("prompt")
    one = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and all(isinstance(t, int) for t in prompt))
    return "" if one else "prompt: several prompts are not followed"


@dataclass
class Begun:
    """What a resumed answer has already: `tokens` of it are known to whoever asks, `chars` of its text, `kept` of the tokens were given to
    the engine, which makes the rest of them again."""

    head: Mapping[str, Any]
    prompt_tokens: int
    tokens: int
    kept: int
    skip_chars: int
    chat: bool


@dataclass
class Tracker:
    """`hide_usage`, `hide_ids`: the client did not ask for them. `begun`: the engine goes on with an answer, by its completions endpoint.
    `prompt`: what it was given; empty: not known (yet). `lost`: some of its tokens were not told, and those after them are not followed."""

    api: TokenApi
    chat: bool
    hide_usage: bool
    hide_ids: bool
    begun: Begun | None = None
    prompt: tuple[int, ...] = ()
    head: dict[str, Any] = field(default_factory=dict)
    lost: bool = False
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    _rest: bytes = b""
    _usage: Usage | None = None
    _skip: int = 0
    _again: int = 0
    _noted: bool = False

    def __post_init__(self) -> None:
        if self.begun is not None:
            self.head = dict(self.begun.head)
            self._skip = self.begun.skip_chars
            self._again = self.begun.tokens - self.begun.kept
            self._noted = True

    @property
    def usage(self) -> Usage:
        return self._usage or Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.generated)

    @property
    def prompt_tokens(self) -> int:
        return self.begun.prompt_tokens if self.begun is not None else len(self.prompt)

    @property
    def generated(self) -> int:
        """Tokens of the answer so far, those that another engine has made among them."""
        return len(self.tokens) + (self.begun.kept if self.begun is not None else 0)

    @property
    def answer(self) -> tuple[int, ...]:
        """Token ids of the answer so far, as `generated` counts them."""
        return (*self.prompt[self.prompt_tokens :], *self.tokens)

    def feed(self, data: bytes) -> tuple[bytes, list[ChoiceDelta]]:
        """What goes to the client, and what that told; events are held back until they are whole."""
        text = self._rest + data if self._rest else data
        end, out = 0, bytearray()
        deltas: list[ChoiceDelta] = []
        for match in _EVENT_END.finditer(text):
            event, end = text[end : match.start()], match.end()
            self._event(event, out, deltas)
        self._rest = text[end:]
        return bytes(out), deltas

    def finish(self) -> bytes:
        """What was held back, as it is."""
        rest, self._rest = self._rest, b""
        return rest

    def _event(self, event: bytes, out: bytearray, deltas: list[ChoiceDelta]) -> None:
        message = _parsed(event)
        if message is None:
            out += event + b"\n\n"
            return
        for choice in message["choices"]:
            self._choice(message, choice, deltas)
        if (usage := usage_of(message)) is not None:
            self._count(message, usage)
            if not message["choices"] and self.hide_usage:
                return
        if not self.head:
            self.head = {k: message[k] for k in _HEAD if message.get(k) is not None}
        if self.begun is not None:
            self._as_begun(message)
            if message["choices"] and not any(map(_says, message["choices"])):
                return
        out += b"data: " + json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def _choice(self, message: dict[str, Any], choice: dict[str, Any], deltas: list[ChoiceDelta]) -> None:
        found = self.api.told(message, choice, hide=self.hide_ids)
        if found.prompt and not self.prompt:
            self.prompt = found.prompt
        ids = self._known(found)
        text = self._text(choice)
        reason = choice.get("finish_reason")
        reason = reason if reason in _REASONS else None
        self.tokens += ids
        self.finish_reason = reason or self.finish_reason
        told, self._again = ids[self._again :], max(0, self._again - len(ids))
        if self.begun is not None and not self.hide_ids:
            self.api.retell(message, choice, told)
        if (
            told or text or reason or not self._noted
        ):  # the first of them tells that there is an answer to go on with, if only its role
            self._noted = True
            deltas.append(ChoiceDelta(index=choice.get("index", 0), text=text, token_ids=told, finish_reason=reason))

    def _known(self, found: Told) -> tuple[int, ...]:
        """The event's tokens, if all before them were told."""
        if found.made is not None and found.made != len(self.tokens) + len(found.ids):
            if not self.tokens and found.made < 0:
                self.prompt = ()  # it tells none at all
            self.lost = True
        return () if self.lost else found.ids

    def _text(self, choice: dict[str, Any]) -> str:
        """What the choice gained, without what its client has already."""
        delta = choice.get("delta")
        place, name = (delta, "content") if isinstance(delta, dict) else (choice, "text")
        text = place.get(name) or ""
        if self._skip and text:
            skipped, text = min(self._skip, len(text)), text[self._skip :]
            self._skip -= skipped
            place[name] = text
        return text

    def _count(self, message: dict[str, Any], usage: Usage) -> None:
        if self.begun is not None:
            begun = self.begun
            cached = min(usage.cached_tokens, begun.prompt_tokens)  # what it found of the answer is not the prompt's
            counted = {"prompt_tokens": begun.prompt_tokens, "completion_tokens": usage.completion_tokens + begun.kept}
            usage = usage.model_copy(update={**counted, "cached_tokens": cached})
            told = message["usage"]
            told["prompt_tokens"], told["completion_tokens"] = usage.prompt_tokens, usage.completion_tokens
            told["total_tokens"] = usage.prompt_tokens + usage.completion_tokens
            if isinstance(details := told.get("prompt_tokens_details"), dict) and "cached_tokens" in details:
                details["cached_tokens"] = cached
        self._usage = usage

    def _as_begun(self, message: dict[str, Any]) -> None:
        """An event of a completion, as the answer that was begun has them."""
        message.update(self.head)
        if not self.chat:
            return
        message["object"] = "chat.completion.chunk"
        for choice in message["choices"]:
            choice["delta"] = {"content": choice.pop("text", "")}


def _says(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return bool(text or choice.get("finish_reason") or choice.get("token_ids"))


def _parsed(event: bytes) -> dict[str, Any] | None:
    """An event with choices; None: anything else, such as [DONE] or an error."""
    if not event.startswith(b"data: {"):
        return None
    try:
        message = from_json(event[6:])
    except ValueError:
        return None
    return message if isinstance(message, dict) and isinstance(message.get("choices"), list) else None
