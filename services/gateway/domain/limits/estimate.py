"""An estimate of a request's tokens, before an engine has counted them."""

from __future__ import annotations

from shared.contracts.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, OtherRequest

_BYTES_PER_TOKEN = 4
"""Of English text in common vocabularies. What differs is corrected when the request ends."""


def estimate_tokens(request: ChatCompletionRequest | CompletionRequest | EmbeddingRequest | OtherRequest, body_bytes: int) -> float:
    """Estimate prompt tokens from the body, and add the completion tokens that the client allows.

    Without a limit of the client, completion tokens are counted only when the request ends.
    """
    prompt = max(1, body_bytes // _BYTES_PER_TOKEN)
    if not isinstance(request, ChatCompletionRequest | CompletionRequest):
        return float(prompt)
    return float(prompt + (request.token_limit or 0) * (request.n or 1))
