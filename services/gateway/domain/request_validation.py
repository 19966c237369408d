"""Checks of a request against the card of its model."""

from __future__ import annotations

from shared.contracts.models import ModelCard
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, not_honoured, prompts_of
from shared.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter

OpenAIRequest = ChatCompletionRequest | CompletionRequest | EmbeddingRequest


def check_supported(request: OpenAIRequest, card: ModelCard) -> None:
    """Check that the engine of `card` can serve the request at all.

    Raises:
        UnsupportedParameter: A parameter would change the output, and the engine ignores it.
        InvalidRequest: A parameter is invalid for the model.
        ContextLengthExceeded: The prompt and the requested tokens exceed the context.
    """
    _check_task(request, card)
    if (name := not_honoured(request, card.capabilities.honours)) is not None:
        raise UnsupportedParameter(
            f"'{name}' would change the output, and the engine of {card.name} ({card.spec.engine}) cannot honour it. Omit it",
            param=name,
        )
    if isinstance(request, EmbeddingRequest):
        _check_inputs(request.input, "input", card)
    else:
        _check_generation(request, card)


def _check_task(request: OpenAIRequest, card: ModelCard) -> None:
    if card.info.task == "embed" and not isinstance(request, EmbeddingRequest):
        raise InvalidRequest(f"{card.name} is an embedding model; send it to /v1/embeddings", param="model")


def _check_generation(request: ChatCompletionRequest | CompletionRequest, card: ModelCard) -> None:
    limit = request.token_limit
    if limit is not None and limit >= card.context_length:
        name = "max_completion_tokens" if getattr(request, "max_completion_tokens", None) else "max_tokens"
        raise ContextLengthExceeded(
            f"This model's maximum context length is {card.context_length} tokens, and {name} asks for {limit} besides the prompt",
            param=name,
        )
    _check_bias(request, card)
    if isinstance(request, ChatCompletionRequest):
        if not card.capabilities.passes_through:
            _check_contents(request, card)
            if request.tool_choice not in (None, "none", "auto") and not request.tools:
                raise InvalidRequest("tool_choice demands a call, and the request has no tools. Send tools", param="tool_choice")
    else:
        if not card.capabilities.passes_through and request.best_of is not None and request.best_of != (request.n or 1):
            raise UnsupportedParameter("'best_of' other than n is not supported", param="best_of")
        _check_inputs(request.prompt, "prompt", card, room=limit or 1)


def _check_bias(request: ChatCompletionRequest | CompletionRequest, card: ModelCard) -> None:
    biased = list(request.logit_bias or ())
    if not all(token.isascii() and token.isdigit() for token in biased):
        raise InvalidRequest("The keys of logit_bias must be token ids. Send integers as strings", param="logit_bias")
    _check_known([int(token) if len(token) < 20 else 1 << 63 for token in biased], "logit_bias", card)


def _check_known(tokens: list[int], param: str, card: ModelCard) -> None:
    size = card.info.vocab_size
    if size and tokens and not 0 <= min(tokens) <= max(tokens) < size:
        raise InvalidRequest(f"{param} has a token id outside the vocabulary of {size}", param=param)


def _check_contents(request: ChatCompletionRequest, card: ModelCard) -> None:
    for i, message in enumerate(request.messages):
        for part in message.content if isinstance(message.content, list) else ():
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise UnsupportedParameter(
                    f"{card.name} accepts text only, and a content part is of type {part.get('type')!r}",
                    param=f"messages[{i}].content",
                )


def _check_inputs(value: str | list[str] | list[int] | list[list[int]], param: str, card: ModelCard, room: int = 0) -> None:
    prompts = prompts_of(value)
    if not prompts:
        raise InvalidRequest(f"'{param}' is empty", param=param)
    for prompt in prompts:
        if isinstance(prompt, list) and not prompt:
            raise InvalidRequest(f"'{param}' holds an empty list of tokens", param=param)
        if isinstance(prompt, list):
            _check_known(prompt, param, card)
        if isinstance(prompt, list) and len(prompt) + room > card.context_length:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {card.context_length} tokens; the prompt has {len(prompt)} and asks for {room} more",
                param=param,
            )
