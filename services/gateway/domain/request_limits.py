"""Limits on counts in one request that are cheap to send and expensive to serve."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, prompts_of
from shared.errors import InvalidRequest


@dataclass(frozen=True)
class RequestLimits:
    """Maximum counts in one request.

    Attributes:
        choices: Of all prompts together.
    """

    prompts: int = 2048
    choices: int = 1024
    messages: int = 2048
    content_parts: int = 4096
    tools: int = 512
    stops: int = 64
    biases: int = 1024

    def check(self, request: ChatCompletionRequest | CompletionRequest | EmbeddingRequest) -> None:
        """Raise `InvalidRequest` for the first count above its limit."""
        if isinstance(request, EmbeddingRequest):
            _require(len(prompts_of(request.input)), self.prompts, "input", "inputs", "THAW_MAX_PROMPTS")
            return
        stop_tokens = request.stop_token_ids or ()
        _require(len(request.stops) + len(stop_tokens), self.stops, "stop", "stop strings and tokens", "THAW_MAX_STOPS")
        _require(len(request.logit_bias or ()), self.biases, "logit_bias", "entries of logit_bias", "THAW_MAX_LOGIT_BIASES")
        choices = request.n or 1
        if isinstance(request, ChatCompletionRequest):
            self._check_chat(request)
        else:
            prompts = len(prompts_of(request.prompt))
            _require(prompts, self.prompts, "prompt", "prompts", "THAW_MAX_PROMPTS")
            choices = prompts * max(choices, request.best_of or 1)
        _require(choices, self.choices, "n", "choices", "THAW_MAX_CHOICES")

    def _check_chat(self, request: ChatCompletionRequest) -> None:
        _require(len(request.messages), self.messages, "messages", "messages", "THAW_MAX_MESSAGES")
        parts = sum(len(m.content) for m in request.messages if isinstance(m.content, list))
        _require(parts, self.content_parts, "messages", "content parts", "THAW_MAX_CONTENT_PARTS")
        _require(len(request.tools or ()), self.tools, "tools", "tools", "THAW_MAX_TOOLS")


def _require(count: int, limit: int, param: str, noun: str, setting: str) -> None:
    if count > limit:
        raise InvalidRequest(
            f"The request has {count} {noun}, and the limit is {limit}. Split it, or have the operator raise {setting}",
            param=param,
        )
