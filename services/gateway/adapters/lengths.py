"""Prompts that cannot fit a model's context are refused before anything is sent, with the model's own tokenizer and without torch."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

from shared.contracts.models import ModelCard
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, prompts_of
from shared.errors import ContextLengthExceeded

log = logging.getLogger(__name__)
_AVAILABLE = importlib.util.find_spec("tokenizers") is not None
"""A gateway without the library leaves the check to the engine."""
_KEPT = 8
"""Tokenizers kept in memory, some tens of megabytes each."""


class Lengths:
    """Counts tokens only of prompts that have more bytes than the context has tokens: no token is shorter than a byte.

    What a chat template adds is not counted, so that nothing is refused here that the engine would take; the engine counts exactly.
    """

    def __init__(self) -> None:
        self._tokenizers: OrderedDict[tuple[str, str], Any] = OrderedDict()

    async def check(self, request: ChatCompletionRequest | CompletionRequest | EmbeddingRequest, card: ModelCard) -> None:
        """Raise `ContextLengthExceeded` for a prompt that is too long. The model's files must be on this machine; else nothing is checked."""
        param, texts = _texts(request)
        room = 0 if isinstance(request, EmbeddingRequest) else (request.token_limit or 1)
        fits = card.context_length - room
        long = [t for t in texts if len(t) > fits or (len(t) > fits // 4 and len(t.encode()) > fits)]
        if not long or not _AVAILABLE:
            return
        tokenizer = await self._tokenizer(card)
        if tokenizer is None:
            return
        counted = await asyncio.to_thread(lambda: max(len(e.ids) for e in tokenizer.encode_batch(long, add_special_tokens=False)))
        if counted > fits:
            asked = f", and {room} are asked for" if room > 1 else ""
            raise ContextLengthExceeded(
                f"This model's maximum context length is {card.context_length} tokens. The {param} has at least {counted}{asked}.",
                param=param,
            )

    async def _tokenizer(self, card: ModelCard) -> Any | None:
        key = (card.info.source, card.info.revision)
        if key not in self._tokenizers:
            path = Path(card.info.source) / "tokenizer.json"
            self._tokenizers[key] = await asyncio.to_thread(_load, path)
            while len(self._tokenizers) > _KEPT:
                self._tokenizers.popitem(last=False)
        self._tokenizers.move_to_end(key)
        return self._tokenizers[key]


def _load(path: Path) -> Any | None:
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exception for a file that it cannot read
        log.warning("a tokenizer cannot be read; lengths are left to the engine", extra={"path": str(path), "error": str(e)})
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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
