"""Define the OpenAI requests that the gateway validates.

The builtin engine reads the same models.

Fields outside the schema are kept (`extra="allow"`) and go to the engine. Names and ranges: the
OpenAI API reference; `top_k`, `min_p`, `repetition_penalty`, `ignore_eos`, `stop_token_ids`,
`return_token_ids`, `chat_template_kwargs` and `add_generation_prompt` as vLLM has them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from shared.contracts.engines import EVERYTHING

INERT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"})
"""Known fields that do not change the output: accepted and not forwarded as unknown."""

NOT_HONOURED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "suffix": ("",),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "prompt_logprobs": (0,),
    "prompt_embeds": (),
}
"""Known fields that would change the output and that the built-in engine cannot honour, each with
the values, besides null, with which they change nothing.
"""


Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Prompts = str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
"""Every list stops at its first invalid entry: a body of 160,000 nulls is one error, not 160,000
(140 MB).
"""
MAX_BIASES = 4096
"""Most entries of `logit_bias`, counted before they are validated: pydantic reports each invalid
entry of a dictionary.
"""


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class StreamOptions(_Open):
    include_usage: bool = False


class _Generation(_Open):
    """The common fields of chat and text completions."""

    model: str
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16, fail_fast=True)]
        | None
    ) = None
    stop_token_ids: TokenIds | None = None
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

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:
            raise ValueError(f"at most {MAX_BIASES} entries are allowed")
        return value

    @field_validator("stream_options")
    @classmethod
    def _stream_options(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("only allowed when stream is true")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatMessage(_Open):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | Objects | None = None

    @model_validator(mode="after")
    def _content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is required for role {self.role!r}")
        return self


class ChatCompletionRequest(_Generation):
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs to be true")
        return value

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def default_tokens(self) -> int | None:
        """The limit of a request without `max_tokens`: none but the context."""
        return None


DEFAULT_COMPLETION_TOKENS = 16
"""Most tokens of a text completion whose request does not have `max_tokens`."""


class CompletionRequest(_Generation):
    prompt: Prompts
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = Field(default=None, ge=1)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def default_tokens(self) -> int | None:
        """The limit of a request without `max_tokens`; None: only the context limits it.

        As with vLLM, an explicit null sets no limit.
        """
        return None if "max_tokens" in self.model_fields_set else DEFAULT_COMPLETION_TOKENS


class EmbeddingRequest(_Open):
    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    user: str | None = None


class OtherRequest(_Open):
    """A request to another route, for an engine that declares it (`ModelCard.routes`)."""

    model: str
    stream: bool | None = None


def not_honoured(request: BaseModel, honours: frozenset[str] = frozenset()) -> str | None:
    """The first field of `request` that asks an engine for what it cannot do.

    `honours`: as in `Capabilities`.
    """
    given = (request.model_extra or {}) | {name: getattr(request, name) for name in request.model_fields_set & NOT_HONOURED.keys()}
    asked = (n for n, harmless in NOT_HONOURED.items() if given.get(n) is not None and given[n] not in harmless)
    return None if EVERYTHING in honours else next((n for n in asked if n not in honours), None)


def prompts_of(value: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or a batch of them, each as text or as token ids."""
    if isinstance(value, str):
        return [value]
    if value and isinstance(value[0], int):  # validated: all of them are, and there may be hundreds of thousands
        return [value]
    return list(cast("list[str | list[int]]", value))
