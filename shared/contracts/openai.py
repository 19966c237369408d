"""The OpenAI requests that Thaw understands, as the gateway validates them and the builtin engine reads them.

Fields outside the schema are kept (`extra="allow"`) and go to the engine. Names and ranges: the OpenAI API reference; `top_k`, `min_p`,
`repetition_penalty`, `ignore_eos`, `stop_token_ids`, `return_token_ids`, `chat_template_kwargs` and `add_generation_prompt` as vLLM has them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

INERT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"})
"""Known fields that do not change the output: accepted and not forwarded as unknown."""


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class StreamOptions(_Open):
    include_usage: bool = False


class _Generation(_Open):
    """What chat and text completions have in common."""

    model: str
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: (
        Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] | None
    ) = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int | None = Field(default=None, ge=1, le=128)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: str | None = None

    @model_validator(mode="after")
    def _stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatMessage(_Open):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is required for role {self.role!r}")
        return self


class ChatCompletionRequest(_Generation):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Generation):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = Field(default=None, ge=1)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class EmbeddingRequest(_Open):
    model: str
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    user: str | None = None


def prompts_of(value: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or a batch of them, each as text or as token ids."""
    if isinstance(value, str):
        return [value]
    ids = [item for item in value if isinstance(item, int)]
    return [ids] if ids else [item for item in value if not isinstance(item, int)]
