"""Sequences on the computing thread: how each begins, chooses its next token, and what of it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import torch

from services.engine.domain.generation import Generation
from services.engine.domain.step_planning import SequenceView
from services.engine.generation.philox import Draw
from services.engine.generation.request import Choice, GenerationRequest
from services.engine.generation.sampling import History, Sampled, sample
from services.engine.tokenization import Tokenization
from shared.contracts.inference import ChoiceDelta, TokenLogprob, TopLogprob

_LEAST_LOGPROB = -9999.0
"""What minus infinity is told as: JSON has no such number."""


@dataclass
class Sequence:
    """`state` has keys and values of the first `computed` of `tokens`; `owed`: text to be told with the next token."""

    key: int
    request: GenerationRequest
    choice: Choice
    tokens: list[int]
    generation: Generation
    history: History
    computed: int = 0
    state: Any = None
    owed: str = ""

    @classmethod
    def begin(cls, key: int, request: GenerationRequest, choice: Choice, tokenization: Tokenization) -> Sequence:
        """With the tokens that another engine has made of it."""
        begun, penalised = choice.begun, request.params.penalised
        made = begun.tokens if begun is not None else ()
        return cls(
            key,
            request,
            choice,
            [*choice.prompt, *made],
            begun.generation if begun is not None else Generation(tokenization.decode, choice.prompt, choice.ending),
            History(frozenset(choice.prompt), Counter(made)) if penalised else History(frozenset(), Counter()),
            owed=begun.owed.text if begun is not None else choice.echo or "",
        )

    @property
    def view(self) -> SequenceView:
        return SequenceView(self.key, len(self.tokens), self.computed)

    @property
    def whole(self) -> bool:
        """Whether the last step gave the logits of its next token."""
        return self.computed == len(self.tokens)

    def give_way(self) -> None:
        """Its keys and values are lost."""
        self.computed, self.state = 0, None

    def gain(self, sampled: Sampled, tokenization: Tokenization) -> ChoiceDelta:
        """Take the token on; what is to be told of it."""
        owed, self.owed = self.owed, ""
        gained = self.generation.feed(sampled.token)
        self.tokens.append(sampled.token)
        if self.request.params.penalised:
            self.history.output[sampled.token] += 1
        return ChoiceDelta(
            index=self.choice.index,
            text=owed + gained.text,
            token_ids=(sampled.token,),
            logprobs=(_told(sampled, tokenization),) if sampled.logprob is not None else None,
            finish_reason=gained.finish_reason,
        )


def choose(sequences: Many[Sequence], logits: torch.Tensor) -> list[Sampled]:
    """The next token of each, from its row of `logits`."""
    params = [s.request.params for s in sequences]
    if all(p.greedy and p.untouched and p.top_logprobs is None for p in params):
        return [Sampled(token) for token in logits.argmax(dim=-1).tolist()]
    return [
        sample(row, p, s.history, Draw(p.seed, s.choice.index, s.generation.count))
        for s, p, row in zip(sequences, params, logits, strict=True)
    ]


def _told(sampled: Sampled, tokenization: Tokenization) -> TokenLogprob:
    assert sampled.logprob is not None
    own = _top(sampled.token, sampled.logprob, tokenization)
    top = tuple(_top(token, logprob, tokenization) for token, logprob in sampled.top)
    return TokenLogprob(**own.model_dump(), top=top)


def _top(token: int, logprob: float, tokenization: Tokenization) -> TopLogprob:
    raw = tokenization.token_bytes(token)
    told = max(logprob, _LEAST_LOGPROB)
    return TopLogprob(token_id=token, token=raw.decode(errors="replace"), logprob=told, bytes=tuple(raw))
