"""Streams of vLLM and llama-server with token ids, as those servers send them.

The engine's tokens are the bytes of UTF-8. It generates `fake.says`, and continues it after a
prompt that ends with a part of it. It holds back partial characters, and text that may begin a stop
string. `fake.hold`, {"tokens": n, "file": file}, holds the stream after n tokens until the file
exists.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

_END = 0
"""The last token of every prompt."""
ID = "chatcmpl-fake"
_numbers = itertools.count(1)


def prompt_of(body: Any) -> list[int]:
    prompt = body.get("content", body.get("prompt"))
    if isinstance(prompt, list):
        return prompt
    text = prompt if prompt is not None else "".join(m["content"] for m in body["messages"])
    return [*text.encode(), _END]


def text_of(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


async def saying(body: Any, *, chat: bool) -> AsyncIterator[str]:
    prompt = prompt_of(body)
    generated = len(prompt) - 1 - prompt[::-1].index(_END) + 1
    rest = body["fake"]["says"].encode()[len(prompt) - generated :]
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    most = body.get("max_completion_tokens") or body.get("max_tokens") or len(rest)
    with_ids = bool(body.get("return_token_ids"))
    ident = f"{ID}-{next(_numbers)}"
    if chat:
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield _event(ident, chat, [first], {"prompt_token_ids": prompt} if with_ids else {})
    sent, made = 0, 0
    for made in range(1, min(most, len(rest)) + 1):
        text, reason = rest[:made].decode(errors="ignore"), None
        found = [text.index(s) for s in stops if s in text]
        if found:
            text, reason = text[: min(found)], "stop"
        elif made == len(rest):
            reason = "stop"
        elif made == most:
            text, reason = rest[:made].decode(errors="replace"), "length"
        else:
            text = text[: max(0, len(text) - max((len(s) - 1 for s in stops), default=0))]
        delta, sent = text[sent:], max(sent, len(text))
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        choice |= {"delta": {"content": delta}} if chat else {"text": delta}
        if with_ids:
            choice["token_ids"] = [rest[made - 1]]
            if not chat and made == 1:
                choice["prompt_token_ids"] = prompt
        yield _event(ident, chat, [choice])
        if reason is not None:
            break
        await asyncio.sleep(body["fake"].get("pace", 0.0))
        hold = body["fake"].get("hold") or {}
        while made == hold.get("tokens") and not Path(hold["file"]).exists():  # noqa: ASYNC110  # made by another process
            await asyncio.sleep(0.02)
    if (body.get("stream_options") or {}).get("include_usage"):
        counted = {"prompt_tokens": len(prompt), "completion_tokens": made, "total_tokens": len(prompt) + made}
        yield _event(ident, chat, [], {"usage": counted})
    yield "data: [DONE]\n\n"


async def saying_llama(body: Any) -> AsyncIterator[str]:
    """Build text completions of llama-server.

    With `verbose` each event has its last token and the number of tokens. A partial character has
    no event.
    """
    prompt = prompt_of(body)
    generated = len(prompt) - 1 - prompt[::-1].index(_END) + 1
    rest = body["fake"]["says"].encode()[len(prompt) - generated :]
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    most = min(body.get("max_tokens") or len(rest), len(rest))
    ident = f"{ID}-{next(_numbers)}"
    sent, reason, made = 0, "length" if most < len(rest) else "stop", 0

    def event(text: str, ids: list[int], finish: str | None, more: Any = None) -> str:
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}
        verbose = {"content": text, "tokens": ids, "tokens_predicted": made, "tokens_evaluated": len(prompt)}
        extra = {"__verbose": {**verbose, **({"prompt": "all of it"} if finish else {})}} if body.get("verbose") else {}
        return _event(ident, False, [choice], {"system_fingerprint": "b1-fake", **extra, **(more or {})})

    for made in range(1, most + 1):
        text = rest[:made].decode(errors="ignore")
        if len(text.encode()) < made:
            continue
        found = [text.index(s) for s in stops if s in text]
        shown = text[: min(found)] if found else text[: len(text) - _begun(text, stops)]
        yield event(shown[sent:], [rest[made - 1]], None)
        sent = max(sent, len(shown))
        if found:
            reason = "stop"
            break
        await asyncio.sleep(body["fake"].get("pace", 0.0))
    counted = {"prompt_tokens": len(prompt), "completion_tokens": made, "total_tokens": len(prompt) + made}
    yield event("", [], reason, {"usage": counted})
    yield "data: [DONE]\n\n"


def _begun(text: str, stops: list[str]) -> int:
    """Return how many characters at the end of `text` may begin a stop string."""
    return max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


def _event(ident: str, chat: bool, choices: list[Any], more: Any = None) -> str:
    kind = "chat.completion.chunk" if chat else "text_completion"
    event = {"id": ident, "object": kind, "created": hash(ident) % 10**9, "model": "demo", "choices": choices, **(more or {})}
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
