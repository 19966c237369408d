"""Refusal of prompts that exceed a model's context, before the request is queued.

The gateway counts with the model's own tokenizer, and without torch.
"""

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
from services.gateway.adapters.token_bound import longest_token_bytes
from services.gateway.adapters.tokenizer_files import TOKENIZER, TokenizerFiles
from shared.contracts.models import ModelCard
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, prompts_of
from shared.errors import ContextLengthExceeded, InvalidRequest, NotFound, PayloadTooLarge, Unavailable

log = logging.getLogger(__name__)
_AVAILABLE = importlib.util.find_spec("tokenizers") is not None
"""False: the engine checks the length itself."""
_MAX_TOKENIZERS = 8
"""Tokenizers cached in memory; each takes tens of megabytes."""
_LOAD_TIMEOUT_S = 3.0
"""A request waits this long for a tokenizer; one that loads later serves the next request."""
_COUNT_TIMEOUT_S = 30.0
"""A request whose response is the count waits longer."""
_RETRY_S = 30.0
_MAX_COUNTED_BYTES = 1 << 20
"""Longer text is left to the engine: 1 MiB takes the tokenizer about a second and 200 MB."""
_MAX_COUNTS = 2
"""Texts that are counted at a time."""
_TEMPLATE_BYTES, _MESSAGE_BYTES = 4096, 64
"""Upper bounds of what chat templates add to a conversation, and to each message."""


class TokenCounter:
    """The tokenizer and chat template of one model. Thread-safe."""

    def __init__(self, tokenizer: Any, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._longest_token_bytes = longest_token_bytes(tokenizer)

    @classmethod
    def from_files(cls, files: dict[str, bytes]) -> TokenCounter | None:
        """Load a counter; None if there is no tokenizer that can be read."""
        if TOKENIZER not in files:
            return None
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_str(files[TOKENIZER].decode())
        except Exception as e:  # the library raises bare Exception for a malformed file
            log.warning("failed to read a tokenizer; the engine checks lengths", extra={"error": str(e)})
            return None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, ChatTemplate.from_files(files))

    def count_chat(self, request: ChatCompletionRequest, text: str, limit: int) -> int | None:
        """Count the tokens of a conversation; see `count_longest`.

        Args:
            text: The messages' text, which is tokens if the template cannot be rendered.
        """
        with contextlib.suppress(Unrenderable):
            text = self._template.render(request) if self._template is not None else text
        return self.count_longest([text], limit)

    def count_exactly(self, request: ChatCompletionRequest) -> int:
        """Count the tokens of a conversation as the model's chat template renders it.

        Raises:
            Unrenderable: The model has no template, or the template refuses the conversation.
            PayloadTooLarge: Counting would take too long.
        """
        if self._template is None:
            raise Unrenderable
        text = self._template.render(request)
        if (size := len(text.encode(errors="replace"))) > _MAX_COUNTED_BYTES:
            raise PayloadTooLarge(
                f"The conversation has {size} bytes, and at most {_MAX_COUNTED_BYTES} are counted. Send a shorter one"
            )
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def count_longest(self, texts: list[str], limit: int) -> int | None:
        """Count the tokens of the longest text.

        Args:
            limit: A text that certainly has more tokens is not tokenized.

        Returns:
            The tokens, or a lower bound above `limit`; None if counting would take too long.
        """
        sizes = [len(text.encode(errors="replace")) for text in texts]
        if self._longest_token_bytes is not None and max(sizes) > limit * self._longest_token_bytes:
            return -(-max(sizes) // self._longest_token_bytes)
        if sum(sizes) > _MAX_COUNTED_BYTES:
            return None
        # Without offsets and lists of ids, which take memory and the interpreter lock.
        return max(len(encoding) for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))


class PromptLengthChecker:
    """Count the tokens of prompts that may exceed the context.

    A prompt with fewer bytes than the context has tokens always fits. Prompts over 1 MiB are
    refused if their bytes alone prove that they do not fit. The engine checks again.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        self._counters: OrderedDict[tuple[str, str], asyncio.Task[TokenCounter | None]] = OrderedDict()
        self._loaded_at: dict[tuple[str, str], float] = {}
        self._counting = asyncio.Semaphore(_MAX_COUNTS)

    async def check(self, request: ChatCompletionRequest | CompletionRequest | EmbeddingRequest, card: ModelCard) -> None:
        """Raise `ContextLengthExceeded` for a prompt that is certainly too long."""
        param, texts = _texts(request)
        requested = 0 if isinstance(request, EmbeddingRequest) else (request.token_limit or 1)
        limit = card.context_length - requested
        overhead = _template_bytes(request)
        long = [t for t in texts if len(t) * 4 + overhead > limit and len(t.encode(errors="replace")) + overhead > limit]
        if not long or not _AVAILABLE:
            return
        counter = await self._counter(card, _LOAD_TIMEOUT_S)
        if counter is None:
            return
        async with self._counting:
            if isinstance(request, ChatCompletionRequest):
                tokens = await asyncio.to_thread(counter.count_chat, request, long[0], limit)
            else:
                tokens = await asyncio.to_thread(counter.count_longest, long, limit)
        if tokens is not None and tokens > limit:
            suffix = f", and {requested} are requested" if requested > 1 else ""
            raise ContextLengthExceeded(
                f"This model's maximum context length is {card.context_length} tokens. The {param} has at least {tokens}{suffix}.",
                param=param,
            )

    async def count(self, request: ChatCompletionRequest, card: ModelCard) -> int:
        """Count the tokens of a conversation.

        Raises:
            NotFound: No node has a tokenizer of the model that the gateway can read.
            Unavailable: The tokenizer is still being read.
            InvalidRequest: The chat template refuses the conversation, or the model has none.
            PayloadTooLarge: The conversation is too long to count.
        """
        counter = await self._counter(card, _COUNT_TIMEOUT_S) if _AVAILABLE else None
        if counter is None:
            task = self._counters.get((card.info.source, card.info.revision))
            if task is not None and not task.done():
                raise Unavailable(f"The tokenizer of {card.name} is still being read. Repeat the request")
            raise NotFound(
                f"The gateway cannot read a tokenizer of {card.name} ({card.spec.engine}), and its engine counts no tokens"
            )
        async with self._counting:
            try:
                return await asyncio.to_thread(counter.count_exactly, request)
            except Unrenderable:
                raise InvalidRequest(
                    f"The chat template of {card.name} does not render this conversation. Send text in the roles that it knows",
                    param="messages",
                ) from None

    async def _counter(self, card: ModelCard, timeout_s: float) -> TokenCounter | None:
        key, now = (card.info.source, card.info.revision), time.monotonic()
        task = self._counters.get(key)
        if task is None or (task.done() and task.result() is None and now - self._loaded_at[key] > _RETRY_S):
            self._loaded_at[key] = now
            task = self._counters[key] = asyncio.create_task(self._load(card.info.source), name="tokenizer")
            while len(self._counters) > _MAX_TOKENIZERS:
                oldest, _ = self._counters.popitem(last=False)
                del self._loaded_at[oldest]
        self._counters.move_to_end(key)
        if not task.done():
            await asyncio.wait({task}, timeout=timeout_s)
        return task.result() if task.done() else None

    async def _load(self, source: str) -> TokenCounter | None:
        try:
            return await asyncio.to_thread(TokenCounter.from_files, await self._files.read(source))
        except Exception:  # the result is shared: an exception would fail every later request
            log.exception("failed to load a tokenizer", extra={"source": source})
            return None


def _template_bytes(request: ChatCompletionRequest | CompletionRequest | EmbeddingRequest) -> int:
    """Return an upper bound of the bytes that a chat template adds."""
    if not isinstance(request, ChatCompletionRequest):
        return 0
    extra = json.dumps([request.tools, request.chat_template_kwargs]) if request.tools or request.chat_template_kwargs else ""
    calls = sum(len(str(m.model_extra)) for m in request.messages if m.model_extra)
    return _TEMPLATE_BYTES + _MESSAGE_BYTES * len(request.messages) + 4 * len(extra) + 4 * calls


def _texts(request: ChatCompletionRequest | CompletionRequest | EmbeddingRequest) -> tuple[str, list[str]]:
    """Return the parameter's name, and its prompts; a conversation is one prompt."""
    if isinstance(request, ChatCompletionRequest):
        return "messages", ["".join(_text_of(m.content) for m in request.messages)]
    name, value = ("prompt", request.prompt) if isinstance(request, CompletionRequest) else ("input", request.input)
    return name, [p for p in prompts_of(value) if isinstance(p, str)]


def _text_of(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        texts = (part.get("text") for part in content)
        return "".join(t for t in texts if isinstance(t, str))
    return content or ""
