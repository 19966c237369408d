"""An estimate of a request's tokens, before an engine has counted them."""

from __future__ import annotations

from shared.contracts.engines import Engine
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, OtherRequest

_ASSUMED_COMPLETION = 256
"""Completion tokens of a request that does not limit them, as its size is predicted."""
_HAS_DEFAULT_LIMIT: frozenset[Engine] = frozenset({"builtin", "vllm", "sglang"})
"""Engines that limit a text completion without `max_tokens` (docs/clients.md)."""
_BYTES_PER_TOKEN = 4
"""Usual for English text in common vocabularies. The end of a request corrects its estimate."""


def estimate_tokens(request: ChatCompletionRequest | CompletionRequest | EmbeddingRequest | OtherRequest, body_bytes: int) -> float:
    """Estimate prompt tokens from the body, and add the completion tokens that the client allows.

    Without a limit of the client, completion tokens are counted only when the request ends.
    """
    return _count(request, body_bytes, 0)


def predict_cost(
    request: ChatCompletionRequest | CompletionRequest | EmbeddingRequest | OtherRequest, body_bytes: int, engine: Engine
) -> float:
    """Predict the size of a request in tokens, for its key's share of a model of `engine`."""
    default = request.default_tokens if isinstance(request, CompletionRequest) and engine in _HAS_DEFAULT_LIMIT else None
    return _count(request, body_bytes, default or _ASSUMED_COMPLETION)


def _count(
    request: ChatCompletionRequest | CompletionRequest | EmbeddingRequest | OtherRequest, body_bytes: int, assumed: int
) -> float:
    prompt = max(1, body_bytes // _BYTES_PER_TOKEN)
    if not isinstance(request, ChatCompletionRequest | CompletionRequest):
        return float(prompt)
    return float(prompt + (request.token_limit or assumed) * (request.n or 1))
