"""Prompts that cannot fit a model's context are refused before anything is sent, with the model's own tokenizer and without torch."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import time
from collections import OrderedDict
from typing import Any

from services.gateway.adapters.chat_template import ChatTemplate, Unrenderable
from services.gateway.adapters.tokenizer_files import TOKENIZER, ModelFiles
from shared.contracts.models import ModelCard
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, prompts_of
from shared.errors import ContextLengthExceeded

log = logging.getLogger(__name__)
_AVAILABLE = importlib.util.find_spec("tokenizers") is not None
"""A gateway without the library leaves the check to the engine."""
_KEPT = 8
"""Tokenizers kept in memory, some tens of megabytes each."""
_PATIENCE_S = 3.0
"""How long a request waits for its model's tokenizer; one that takes longer to come serves the next request."""
_LOOK_AGAIN_S = 30.0
_TEMPLATE_BYTES, _MESSAGE_BYTES = 4096, 64
"""More than chat templates add to a conversation, and to each of its messages."""


class Counter:
    """One model's tokenizer and chat template. Thread-safe."""

    def __init__(self, tokenizer: Any, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @classmethod
    def of(cls, files: dict[str, bytes]) -> Counter | None:
        if TOKENIZER not in files:
            return None
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_str(files[TOKENIZER].decode())
        except Exception as e:  # the library raises bare Exception for a file that it cannot read
            log.warning("a tokenizer cannot be read; lengths are left to the engine", extra={"error": str(e)})
            return None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, ChatTemplate.of(files))

    def chat(self, request: ChatCompletionRequest, text: str) -> int:
        """Tokens of the rendered conversation; where it cannot be rendered, of what it says (`text`), which is less."""
        with contextlib.suppress(Unrenderable):
            text = self._template.render(request) if self._template is not None else text
        return self.longest([text])

    def longest(self, texts: list[str]) -> int:
        return max(len(e.ids) for e in self._tokenizer.encode_batch(texts, add_special_tokens=False))


class Lengths:
    """Counts tokens only of prompts that may have more bytes than the context has tokens: no token is shorter than a byte. The engine has
    the last word."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._counters: OrderedDict[tuple[str, str], asyncio.Task[Counter | None]] = OrderedDict()
        self._looked: dict[tuple[str, str], float] = {}

    async def check(self, request: ChatCompletionRequest | CompletionRequest | EmbeddingRequest, card: ModelCard) -> None:
        """Raise `ContextLengthExceeded` for a prompt that is too long, as far as that can be told here."""
        param, texts = _texts(request)
        room = 0 if isinstance(request, EmbeddingRequest) else (request.token_limit or 1)
        fits = card.context_length - room
        added = _added(request)
        long = [t for t in texts if len(t) * 4 + added > fits and len(t.encode(errors="replace")) + added > fits]
        if not long or not _AVAILABLE:
            return
        counter = await self._counter(card)
        if counter is None:
            return
        if isinstance(request, ChatCompletionRequest):
            counted = await asyncio.to_thread(counter.chat, request, long[0])
        else:
            counted = await asyncio.to_thread(counter.longest, long)
        if counted > fits:
            asked = f", and {room} are asked for" if room > 1 else ""
            raise ContextLengthExceeded(
                f"This model's maximum context length is {card.context_length} tokens. The {param} has at least {counted}{asked}.",
                param=param,
            )

    async def _counter(self, card: ModelCard) -> Counter | None:
        key, now = (card.info.source, card.info.revision), time.monotonic()
        task = self._counters.get(key)
        if task is None or (task.done() and task.result() is None and now - self._looked[key] > _LOOK_AGAIN_S):
            self._looked[key] = now
            task = self._counters[key] = asyncio.create_task(self._load(card.info.source), name="tokenizer")
            while len(self._counters) > _KEPT:
                oldest, _ = self._counters.popitem(last=False)
                del self._looked[oldest]
        self._counters.move_to_end(key)
        if not task.done():
            await asyncio.wait({task}, timeout=_PATIENCE_S)
        return task.result() if task.done() else None

    async def _load(self, source: str) -> Counter | None:
        try:
            return await asyncio.to_thread(Counter.of, await self._files.read(source))
        except Exception:  # a task of its own: what went wrong must not be every later request's error
            log.exception("a model's tokenizer could not be fetched", extra={"source": source})
            return None


def _added(request: ChatCompletionRequest | CompletionRequest | EmbeddingRequest) -> int:
    """A bound on the bytes that a chat template adds."""
    if not isinstance(request, ChatCompletionRequest):
        return 0
    extra = json.dumps([request.tools, request.chat_template_kwargs]) if request.tools or request.chat_template_kwargs else ""
    calls = sum(len(str(m.model_extra)) for m in request.messages if m.model_extra)
    return _TEMPLATE_BYTES + _MESSAGE_BYTES * len(request.messages) + 4 * len(extra) + 4 * calls


def _texts(request: ChatCompletionRequest | CompletionRequest | EmbeddingRequest) -> tuple[str, list[str]]:
    """The parameter's name, and its prompts as texts; a conversation is one."""
    if isinstance(request, ChatCompletionRequest):
        return "messages", ["".join(_content(m.content) for m in request.messages)]
    name, value = ("prompt", request.prompt) if isinstance(request, CompletionRequest) else ("input", request.input)
    return name, [p for p in prompts_of(value) if isinstance(p, str)]


def _content(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        texts = (part.get("text") for part in content)
        return "".join(t for t in texts if isinstance(t, str))
    return content or ""
