"""What an engine has made of an answer so far: enough for another engine to go on with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.gateway.requests.replay_filter import Surplus
from shared.contracts.inference import InferResponse, InferStarted

UNKNOWN = "nothing has been heard of it yet"


@dataclass(slots=True)
class MadeChoice:
    """`chars`: of text that has been passed on."""

    token_ids: list[int] = field(default_factory=list)
    chars: int = 0
    finish_reason: str | None = None


class Made:
    """`fixed`: why nobody else can go on with the answer; empty: another engine can, from its tokens."""

    __slots__ = ("choices", "fixed", "head", "prompt_tokens", "revision", "seed")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """The answer begins anew."""
        self.choices: dict[int, MadeChoice] = {}
        self.fixed = UNKNOWN
        self.seed: int | None = None
        self.prompt_tokens = 0
        self.head: dict[str, Any] = {}
        self.revision = ""

    def begin(self, message: InferStarted | InferResponse, revision: str) -> None:
        """An engine has taken the answer on, from its beginning or from where another one was."""
        self.fixed = message.fixed
        self.seed = message.seed
        self.prompt_tokens = message.prompt_tokens
        self.revision = revision
        if isinstance(message, InferResponse) and message.resume_head:
            self.head = message.resume_head

    def add(self, deltas: list[dict[str, Any]]) -> None:
        """Note `ChoiceDelta`s as they came off the wire."""
        for delta in deltas:
            index = delta.get("index", 0)
            choice = self.choices.get(index)
            if choice is None:
                choice = self.choices[index] = MadeChoice()
            choice.token_ids += delta.get("token_ids", ())
            choice.chars += len(delta.get("text", ""))
            if finish := delta.get("finish_reason"):
                choice.finish_reason = finish

    @property
    def tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.choices.values())

    def resume(self, prepared: str, surplus: Surplus, *, told: bool) -> dict[str, Any] | None:
        """The fields of a `Resume`; None if there is nothing to go on from, or nobody can. `told`: what was made is passed on as it comes, and
        not kept until it is whole. The next engine is to say the `surplus` again."""
        if self.fixed or not self.choices:
            return None
        choices = [self._choice(i, c, *surplus.of(i), told=told) for i, c in sorted(self.choices.items())]
        return {
            "revision": self.revision,
            "choices": choices,
            "prompt_tokens": self.prompt_tokens,
            "seed": self.seed,
            "prepared": prepared,
            "head": self.head,
        }

    @staticmethod
    def _choice(index: int, made: MadeChoice, tokens: int, chars: int, finished: bool, *, told: bool) -> dict[str, Any]:
        return {
            "index": index,
            "token_ids": made.token_ids[: len(made.token_ids) - tokens],
            "text_chars": made.chars - chars if told else 0,
            "finish_reason": None if finished else made.finish_reason,
        }
