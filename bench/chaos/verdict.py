"""The outcome of one request, compared with the undisturbed answer. Pure.

`lost`: the client ended with an error, its own retries included. `cut`: a connection broke together
with its own gateway, the only way in which a stream may end early, and the client then asked again.
`broken`: a connection broke though its gateway was not struck. `truncated`: a stream ended in
order, without a finish. `wrong`: the answer differs from the undisturbed one. `near tie`: it
differs first where the two best tokens are as good as equal. `twice`: two answers to one
Idempotency-Key differ in their id or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Fate = Literal["ok", "lost", "broken", "truncated", "wrong", "near tie", "twice"]
BAD: tuple[Fate, ...] = ("lost", "broken", "truncated", "wrong", "twice")
NEAR_TIE = 0.05
"""Gap of the two best tokens' logits, in standard deviations of all logits, that counts as equal in
bfloat16 (as in the engine's tests).
"""
LOGIT_DEVIATION = 3.0
"""Standard deviation of the demo models' logits (thaw.demo.models)."""


@dataclass(frozen=True)
class Job:
    """A request to send.

    `key`: its Idempotency-Key. `exact`: its answer is determined by its body, so that it can be
    compared. `caller`: the name of its API key.
    """

    number: int
    model: str
    prompt: str
    tokens: int
    stream: bool
    key: str | None = None
    temperature: float = 0.0
    engine: str = "builtin"
    caller: str = ""

    @property
    def exact(self) -> bool:
        return self.temperature == 0

    @property
    def question(self) -> tuple[str, str, int]:
        return self.model, self.prompt, self.tokens

    @property
    def kind(self) -> str:
        return " ".join([self.engine, "stream" if self.stream else "whole", *(["keyed"] if self.key else [])])


@dataclass(frozen=True)
class Answer:
    """The result of one request.

    Attributes:
        tokens: Number of tokens; 0: the engine did not report it.
        error: The reason why there is no response; None: there is one.
        gateway: The gateway that had the connection.
    """

    text: str = ""
    finish: str | None = None
    tokens: int = 0
    response_id: str = ""
    error: str | None = None
    gateway: str | None = None
    disconnected: bool = False


@dataclass
class Exchange:
    """A request from its first sending to its last answer.

    Times in seconds of the monotonic clock.

    Attributes:
        cuts: How often its connection broke with its own gateway, beyond the client's own retries.
        repeats: Answers to the same key, asked for afterwards or beside it.
        server_errors: Responses with a status of 500 or more, those included that the client's own
            retry made good.
    """

    job: Job
    sent: float
    ended: float = 0.0
    answer: Answer = field(default_factory=Answer)
    repeats: list[Answer] = field(default_factory=list)
    cuts: int = 0
    broken: str | None = None
    server_errors: int = 0
    statuses: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Reference:
    """The undisturbed answer.

    Attributes:
        ends: Position at which the text of each token ends.
        gaps: Difference of the log-probabilities of the two best tokens there.
    """

    answer: Answer
    ends: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()


def judge(exchange: Exchange, reference: Reference | None) -> Fate:
    """The worst verdict of the exchange."""
    answer = exchange.answer
    if exchange.broken:
        return "broken"
    if answer.error is not None:
        return "lost"
    if answer.finish is None:
        return "truncated"
    if any(_differs(answer, other) for other in exchange.repeats if other.error is None):
        return "twice"
    if any(other.error is not None for other in exchange.repeats):
        return "lost"
    if reference is None or not exchange.job.exact:
        return "ok" if exchange.job.engine != "builtin" or answer.tokens == exchange.job.tokens else "wrong"
    return _compare(answer, reference)


def _differs(one: Answer, other: Answer) -> bool:
    return (one.response_id, one.text, one.finish) != (other.response_id, other.text, other.finish)


def _compare(answer: Answer, reference: Reference) -> Fate:
    expected = reference.answer
    if answer.text == expected.text:
        return "ok" if answer.finish == expected.finish and answer.tokens in (0, expected.tokens) else "wrong"
    if answer.tokens not in (0, expected.tokens) and expected.finish == "length":
        return "wrong"
    at = first_difference(answer.text, expected.text)
    token = next((i for i, end in enumerate(reference.ends) if end > at), None)
    # A token's text may begin before the letter that differs: a near-tie of that token, or of the
    # one before it.
    nearby = reference.gaps[max(0, token - 1) : token + 1] if token is not None else ()
    return "near tie" if nearby and min(nearby) / LOGIT_DEVIATION <= NEAR_TIE else "wrong"


def first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the first index at which the two differ.

    It is the length of the shorter one if that is a prefix of the longer one.
    """
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
