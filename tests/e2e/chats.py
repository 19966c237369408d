"""Chats with a model of a mesh, by the real openai client."""

from __future__ import annotations

import openai
from openai.types.chat import ChatCompletionMessageParam

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Where does the ice go?"}]


def ask(client: openai.OpenAI, model: str, tokens: int = 12) -> str:
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=tokens, temperature=0)
    return answer.choices[0].message.content or ""


def stream(client: openai.OpenAI, model: str, tokens: int = 12) -> tuple[str, int, str | None]:
    """Return text, completion tokens and finish reason of a streamed response."""
    pieces, tokens_seen, reason = [], 0, None
    chunks = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=tokens, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    for chunk in chunks:
        if chunk.usage:
            tokens_seen = chunk.usage.completion_tokens
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reason = choice.finish_reason or reason
    return "".join(pieces), tokens_seen, reason
