"""Sampling: from logits to a token. Pure functions over tensors.

The order is vLLM's: logit bias, penalties, temperature, min-p, top-k, top-p. A grammar's mask is
applied after the penalties, so that none of them allows a masked token. Reported log-probabilities
are the model's own, before any of these. The sampler uses the Gumbel-max trick as
an exponential race (Maddison et al., "A* sampling", NIPS 2014, section 2): each candidate token has
an exponential number that depends only on the request, and the smallest ratio of number to
probability wins. So a response is the same on every device, in every batch and after a migration.
Rounding matters only where the two best ratios are within rounding error; an inverted cumulative
distribution would be sensitive at every boundary between tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.engine.domain.sampling_params import SamplingParams
from services.engine.generation.philox import Draw

_NUCLEUS_GUESS = 1024
"""Candidates that top-p sorts first; it sorts the whole vocabulary only if these do not reach
top-p.
"""


@dataclass(frozen=True)
class Sampled:
    """A sampled token.

    Attributes:
        top: (token, log-probability) pairs, best first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class History:
    """Tokens of the prompt and of the output, for penalties."""

    prompt: frozenset[int]
    output: Counter[int]


def sample(
    logits: torch.Tensor, params: SamplingParams, history: History, draw: Draw, allowed: torch.Tensor | None = None
) -> Sampled:
    """Choose one token from `logits` (float32, one row), among those that are `allowed`."""
    adjusted = logits if params.is_neutral else _apply_bias_and_penalties(logits, params, history)
    if allowed is not None:
        adjusted = mask_logits(adjusted, allowed)
    token = int(adjusted.argmax()) if params.is_greedy else _draw_token(adjusted, params, draw)
    return token_logprobs(logits, token, params.top_logprobs)


def mask_logits(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return one row of logits with minus infinity for all tokens that are not `allowed`.

    `allowed` may be longer or shorter than the row; what is missing is not allowed.
    """
    width = min(len(allowed), len(logits))
    masked = torch.full_like(logits, -torch.inf)
    here = allowed[:width].to(logits.device)
    masked[:width] = torch.where(here, logits[:width], masked[:width])
    return masked


def token_logprobs(logits: torch.Tensor, token: int, top: int | None) -> Sampled:
    """Return the token with its log-probability and the best alternatives.

    Args:
        logits: Float32, [vocabulary].
        token: The sampled token.
        top: Number of alternatives; None: no log-probabilities.
    """
    if top is None:
        return Sampled(token)
    logprobs = torch.log_softmax(logits, dim=-1)
    best: tuple[tuple[int, float], ...] = ()
    if top:
        values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
        best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Sampled(token, float(logprobs[token]), best)


def _apply_bias_and_penalties(logits: torch.Tensor, params: SamplingParams, history: History) -> torch.Tensor:
    logits = logits.clone()
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        logits.index_add_(0, _ids(logits, ids), torch.tensor(values, dtype=logits.dtype, device=logits.device))
    if params.repetition_penalty != 1.0 and (seen := history.prompt | history.output.keys()):
        at = _ids(logits, tuple(seen))
        values_seen = logits[at]
        logits[at] = torch.where(values_seen > 0, values_seen / params.repetition_penalty, values_seen * params.repetition_penalty)
    if history.output and (params.presence_penalty or params.frequency_penalty):
        at = _ids(logits, tuple(history.output))
        counts = torch.tensor(list(history.output.values()), dtype=logits.dtype, device=logits.device)
        logits[at] -= params.presence_penalty + params.frequency_penalty * counts
    return logits


def _ids(like: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.long, device=like.device)


def _draw_token(logits: torch.Tensor, params: SamplingParams, draw: Draw) -> int:
    probabilities = torch.softmax(logits / params.temperature, dim=-1)
    if params.min_p > 0:
        probabilities = torch.where(probabilities >= params.min_p * probabilities.max(), probabilities, 0.0)
    uniform = torch.from_numpy(draw.draw_uniform(logits.shape[-1])).to(logits.device)
    if params.top_k <= 0 and params.top_p >= 1.0:
        return _draw_index(probabilities, uniform)
    kept, ids = _candidates(probabilities, params)
    return int(ids[_draw_index(kept, uniform[ids])])


def _draw_index(probabilities: torch.Tensor, uniform: torch.Tensor) -> int:
    """Return the index of the smallest ratio of exponential number to probability."""
    exponential = torch.log1p(-uniform).neg().clamp(min=torch.finfo(torch.float64).tiny)
    return int((probabilities / exponential).argmax())


def _candidates(probabilities: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the candidates' probabilities and token ids, most likely first."""
    size = probabilities.shape[-1]
    k = params.top_k if 0 < params.top_k < size else size
    if k == size and params.top_p < 1.0 and size > _NUCLEUS_GUESS:
        guess = probabilities.topk(_NUCLEUS_GUESS)
        # top-p is a fraction of the probability that min-p left, so the total may be below one.
        if guess.values.double().sum() >= params.top_p * probabilities.double().sum():
            return _nucleus(guess.values, guess.indices, params.top_p, float(probabilities.double().sum()))
    ordered = probabilities.topk(k) if k < size else probabilities.sort(descending=True, stable=True)
    values, ids = ordered.values, ordered.indices
    if params.top_p < 1.0:
        return _nucleus(values, ids, params.top_p, float(values.double().sum()))
    return values, ids


def _nucleus(values: torch.Tensor, ids: torch.Tensor, top_p: float, total: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest set of most likely tokens with `top_p` of `total`."""
    before = values.double().cumsum(0) - values.double()
    count = max(1, int((before < top_p * total).sum()))
    return values[:count], ids[:count]
