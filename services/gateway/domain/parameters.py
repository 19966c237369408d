"""What can be refused without asking the engine: fields that would change the output and that it cannot honour, and lengths."""

from __future__ import annotations

from typing import Any

from shared.contracts.models import ModelCard
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, prompts_of
from shared.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter

OpenAIRequest = ChatCompletionRequest | CompletionRequest | EmbeddingRequest

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "suffix": ("",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "prompt_logprobs": (0,),
}
"""Known fields that the builtin engine cannot honour, each with the values that change nothing."""


def check_supported(request: OpenAIRequest, card: ModelCard) -> None:
    """Raise `UnsupportedParameter`, `InvalidRequest` or `ContextLengthExceeded` for what `card`'s engine can never do."""
    _check_task(request, card)
    given = (request.model_extra or {}) | {name: getattr(request, name) for name in request.model_fields_set & _UNSUPPORTED.keys()}
    for name, harmless in _UNSUPPORTED.items():
        value = given.get(name)
        if value is not None and value not in harmless:
            raise UnsupportedParameter(
                f"'{name}' would change the output and the engine of {card.name} ({card.spec.engine}) cannot honour it", param=name
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
    if isinstance(request, CompletionRequest):
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise UnsupportedParameter("'best_of' other than n is not supported", param="best_of")
        _check_inputs(request.prompt, "prompt", card, room=limit or 1)


def _check_inputs(value: str | list[str] | list[int] | list[list[int]], param: str, card: ModelCard, room: int = 0) -> None:
    prompts = prompts_of(value)
    if not prompts:
        raise InvalidRequest(f"'{param}' is empty", param=param)
    for prompt in prompts:
        if isinstance(prompt, list) and not prompt:
            raise InvalidRequest(f"'{param}' holds an empty list of tokens", param=param)
        if isinstance(prompt, list) and len(prompt) + room > card.context_length:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {card.context_length} tokens; the prompt has {len(prompt)} and asks for {room} more",
                param=param,
            )
