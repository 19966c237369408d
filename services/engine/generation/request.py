"""A request to the computing thread: token ids, sampling, stop conditions."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.domain.generation import Generation, TokenText
from services.engine.domain.sampling_params import SamplingParams, StopConditions
from services.engine.generation.lora_layers import LoraAdapter
from services.engine.grammar.compiler import Grammar
from shared.contracts.engines import ToolFormat
from shared.contracts.inference import FairShare
from shared.contracts.migration import RunningChoice

NO_SHARE = FairShare()
"""The fair share of requests without a key."""


@dataclass(frozen=True)
class ResumeState:
    """Tokens of a choice that another engine has generated.

    Attributes:
        unsent: Text of `tokens` that the client has not received, with the finish reason if the
            tokens complete the choice.
    """

    tokens: tuple[int, ...]
    generation: Generation
    unsent: TokenText


@dataclass(frozen=True)
class Choice:
    """One sequence to generate."""

    index: int
    prompt: tuple[int, ...]
    stop_conditions: StopConditions
    echo: str | None = None
    resume_state: ResumeState | None = None


@dataclass(frozen=True)
class GenerationRequest:
    request_id: str
    choices: tuple[Choice, ...]
    params: SamplingParams
    prompt_tokens: int
    prompt_token_ids: tuple[int, ...] | None
    ignored: tuple[str, ...]
    adapter: LoraAdapter | None = None
    variant: str = ""
    finished: tuple[RunningChoice, ...] = ()
    prepared: str = ""
    grammar: Grammar | None = None
    share: FairShare = NO_SHARE
    tool_format: ToolFormat | None = None
    shown_tokens: frozenset[int] = frozenset()
    """Special tokens that are part of the text: those that frame tool calls."""


@dataclass(frozen=True)
class EmbedRequest:
    request_id: str
    inputs: tuple[tuple[int, ...], ...]
    dimensions: int | None
    prompt_tokens: int
    ignored: tuple[str, ...]
    share: FairShare = NO_SHARE
