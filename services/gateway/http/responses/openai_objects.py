"""Objects of OpenAI's API, in its field order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared.contracts.inference import Usage

Delta = dict[str, Any]
"""A `ChoiceDelta`, as decoded from the wire."""


@dataclass(frozen=True)
class Head:
    """Fields common to all objects of one response."""

    id: str
    object: str
    created: int
    model: str

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model, "system_fingerprint": None}


def usage(value: Usage) -> dict[str, Any]:
    """Build the `usage` object."""
    return {
        "prompt_tokens": value.prompt_tokens,
        "completion_tokens": value.completion_tokens,
        "total_tokens": value.prompt_tokens + value.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": value.cached_tokens},
    }


def chat_logprobs(tokens: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """Build the log-probabilities of a chat completion."""
    if tokens is None:
        return None
    return {
        "content": [_chat_token(t) | {"top_logprobs": [_chat_token(p) for p in t.get("top", ())]} for t in tokens],
        "refusal": None,
    }


def _chat_token(token: dict[str, Any]) -> dict[str, Any]:
    raw = token.get("bytes")
    return {"token": token["token"], "logprob": token["logprob"], "bytes": list(raw) if raw else None}


def completion_logprobs(tokens: list[dict[str, Any]] | None, offset: int) -> tuple[dict[str, Any] | None, int]:
    """Build the log-probabilities of /v1/completions.

    Returns them, and the next text offset.
    """
    if tokens is None:
        return None, offset
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token["token"])
    shape = {
        "tokens": [t["token"] for t in tokens],
        "token_logprobs": [t["logprob"] for t in tokens],
        "top_logprobs": [{p["token"]: p["logprob"] for p in t.get("top", ())} for t in tokens],
        "text_offset": offsets,
    }
    return shape, offset
