"""Sequences on the computing thread: creation, sampling, deltas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from services.engine.domain.fair_slots import Claim, Flow, predict_cost
from services.engine.domain.generation import Generation
from services.engine.domain.step_planning import SequenceView
from services.engine.generation.philox import Draw
from services.engine.generation.request import Choice, GenerationRequest
from services.engine.generation.sampling import History, Sampled, mask_logits, sample
from services.engine.grammar.matcher import TokenMatcher
from services.engine.tokenization import Tokenization
from shared.contracts.inference import ChoiceDelta, FairShare, TokenLogprob, TopLogprob

_LEAST_LOGPROB = -9999.0
"""Reported instead of minus infinity, which JSON cannot express."""
_NO_MASKS: Mapping[int, torch.Tensor] = {}


@dataclass
class Sequence:
    """One sequence.

    Attributes:
        computed: Number of tokens whose keys and values are in `state`.
        state: Keys and values of the first `computed` tokens.
        unsent: Text to send with the next token.
        preemptions: How often the sequence lost its keys and values while it ran.
        received: Number of tokens that were computed for it; recomputed ones count once.
        recomputes: Who caused the migration after which its tokens are computed again
            (`StepCosts`); None: none did.
    """

    key: int
    request: GenerationRequest
    choice: Choice
    tokens: list[int]
    generation: Generation
    history: History
    flow: Flow
    computed: int = 0
    state: Any = None
    unsent: str = ""
    preemptions: int = 0
    matcher: TokenMatcher | None = None
    received: int = 0
    recomputes: str | None = None

    @classmethod
    def from_request(cls, key: int, request: GenerationRequest, choice: Choice, tokenization: Tokenization) -> Sequence:
        """Create a choice's sequence, with tokens that another engine generated."""
        resumed, has_penalties = choice.resume_state, request.params.has_penalties
        generated = resumed.tokens if resumed is not None else ()
        decode = tokenization.decode_with(request.shown_tokens) if request.shown_tokens else tokenization.decode
        return cls(
            key,
            request,
            choice,
            [*choice.prompt, *generated],
            resumed.generation if resumed is not None else Generation(decode, choice.prompt, choice.stop_conditions),
            History(frozenset(choice.prompt), Counter(generated)) if has_penalties else History(frozenset(), Counter()),
            flow_of(request.share),
            unsent=resumed.unsent.text if resumed is not None else choice.echo or "",
            matcher=TokenMatcher(request.grammar) if request.grammar is not None else None,
        )

    @property
    def view(self) -> SequenceView:
        greatest_length = len(self.choice.prompt) + self.choice.stop_conditions.max_tokens
        return SequenceView(self.key, len(self.tokens), self.computed, self.preemptions, greatest_length, self.flow.priority)

    @property
    def claim(self) -> Claim:
        view, prompt = self.view, len(self.choice.prompt)
        cost = predict_cost(view.length, prompt, view.greatest_length, self.received, self.request.share.weight)
        return Claim(view, self.flow, cost)

    @property
    def whole(self) -> bool:
        """True if the last step produced the logits of the next token."""
        return self.computed == len(self.tokens)

    def count_recomputed(self, tokens: int) -> tuple[int, str]:
        """Return how many of the next `tokens` another engine had computed, and the cause.

        No engine has computed the last token of the sequence before.
        """
        if self.recomputes is None:
            return 0, ""
        if self.computed + tokens < len(self.tokens):
            return tokens, self.recomputes
        cause, self.recomputes = self.recomputes, None
        return len(self.tokens) - 1 - self.computed, cause

    def preempt(self) -> None:
        """Drop its keys and values."""
        self.computed, self.state, self.recomputes = 0, None, None

    def append_token(self, sampled: Sampled, tokenization: Tokenization) -> ChoiceDelta:
        """Append a sampled token and return the delta for the client."""
        unsent, self.unsent = self.unsent, ""
        gained = self.generation.feed(sampled.token)
        self.tokens.append(sampled.token)
        if self.request.params.has_penalties:
            self.history.output[sampled.token] += 1
        return ChoiceDelta(
            index=self.choice.index,
            text=unsent + gained.text,
            token_ids=(sampled.token,),
            logprobs=(_token_logprob(sampled, tokenization),) if sampled.logprob is not None else None,
            finish_reason=gained.finish_reason,
        )


def flow_of(share: FairShare) -> Flow:
    """Return the flow of a request."""
    return _flow(share.priority, share.flow)


@lru_cache(maxsize=4096)
def _flow(priority: int, name: str) -> Flow:
    """Return the same object for the same flow, so that most comparisons are of identity."""
    return Flow(priority, name)


def choose(sequences: Many[Sequence], logits: torch.Tensor, masks: Mapping[int, torch.Tensor] = _NO_MASKS) -> list[Sampled]:
    """Sample the next token of each sequence from its row of `logits`, which may be changed.

    Args:
        sequences: One for each row.
        logits: [sequences, vocabulary], float32.
        masks: Tokens that a sequence may choose, by its key; all, if it has no entry.
    """
    params = [s.request.params for s in sequences]
    if all(p.is_greedy and p.is_neutral and p.top_logprobs is None for p in params):
        if masks:
            for row, s in zip(logits, sequences, strict=True):
                if s.key in masks:
                    row.copy_(mask_logits(row, masks[s.key]))
        return [Sampled(token) for token in logits.argmax(dim=-1).tolist()]
    return [
        sample(row, p, s.history, Draw(p.seed, s.choice.index, s.generation.count), masks.get(s.key))
        for s, p, row in zip(sequences, params, logits, strict=True)
    ]


def _token_logprob(sampled: Sampled, tokenization: Tokenization) -> TokenLogprob:
    assert sampled.logprob is not None
    own = _top(sampled.token, sampled.logprob, tokenization)
    top = tuple(_top(token, logprob, tokenization) for token, logprob in sampled.top)
    return TokenLogprob(**own.model_dump(), top=top)


def _top(token: int, logprob: float, tokenization: Tokenization) -> TopLogprob:
    raw = tokenization.token_bytes(token)
    reported = max(logprob, _LEAST_LOGPROB)
    return TopLogprob(token_id=token, token=raw.decode(errors="replace"), logprob=reported, bytes=tuple(raw))
