"""A request as the computing thread takes it: token ids, sampling parameters and stop conditions."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.domain.generation import Gained, Generation
from services.engine.domain.sampling_params import Ending, SamplingParams
from services.engine.generation.lora_layers import Adapter
from shared.contracts.migration import RunningChoice


@dataclass(frozen=True)
class Begun:
    """What another engine has made of a choice. `owed`: text of `tokens` that is still to be sent, and whether they complete the choice."""

    tokens: tuple[int, ...]
    generation: Generation
    owed: Gained


@dataclass(frozen=True)
class Choice:
    """One sequence to generate."""

    index: int
    prompt: tuple[int, ...]
    ending: Ending
    echo: str | None = None
    begun: Begun | None = None


@dataclass(frozen=True)
class GenerationRequest:
    request_id: str
    choices: tuple[Choice, ...]
    params: SamplingParams
    prompt_tokens: int
    prompt_token_ids: tuple[int, ...] | None
    ignored: tuple[str, ...]
    adapter: Adapter | None = None
    variant: str = ""
    finished: tuple[RunningChoice, ...] = ()
    prepared: str = ""


@dataclass(frozen=True)
class EmbedRequest:
    request_id: str
    inputs: tuple[tuple[int, ...], ...]
    dimensions: int | None
    prompt_tokens: int
    ignored: tuple[str, ...]
