"""Sampling parameters and stop conditions of one request."""

from __future__ import annotations

from dataclasses import dataclass

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters; neutral values are not applied.

    Attributes:
        top_logprobs: Number of log-probabilities per token; 0: that of the sampled token only;
            None: no log-probabilities.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def is_neutral(self) -> bool:
        """True if logits reach the sampler unmodified."""
        return not self.logit_bias and not self.has_penalties

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


@dataclass(frozen=True)
class StopConditions:
    """The conditions that end a response.

    After `max_tokens`, at a stop token (whose text is not shown), or before a stop string.
    """

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
