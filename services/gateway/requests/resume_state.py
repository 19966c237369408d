"""The state from which another engine can continue a response."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from services.gateway.requests.replay_filter import ReplayFilter
from shared.contracts.inference import InferResponse, InferStarted

_NOT_STARTED = "the engine has not started it yet"


@dataclass(slots=True)
class ResumeChoice:
    """Output of one choice.

    Attributes:
        chars: Characters of the text, which may lag behind the tokens.
    """

    token_ids: list[int] = field(default_factory=list)
    chars: int = 0
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """The generated part of a choice."""

    tokens: int = 0
    chars: int = 0
    is_finished: bool = False

    def advance_by(self, delta: dict[str, Any]) -> Position:
        """Return the position after a `ChoiceDelta`, as decoded from the wire."""
        return Position(
            self.tokens + len(delta.get("token_ids", ())),
            self.chars + len(delta.get("text", "")),
            self.is_finished or bool(delta.get("finish_reason")),
        )


class ResumeState:
    """Tokens generated so far, and what else an engine needs to continue from them.

    Attributes:
        not_resumable_reason: The reason why no other engine can continue; empty if one can.
        revision: Revision of the weights that generated the tokens.
        head: Fields common to all parts of an HTTP response, as its id.
        replay_filter: Output that was forwarded and will be generated again.
    """

    __slots__ = (
        "_attempt_start",
        "_kept_tokens",
        "_regenerated",
        "choices",
        "head",
        "not_resumable_reason",
        "prompt_tokens",
        "replay_filter",
        "revision",
        "seed",
    )

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Expect a response from its beginning."""
        self.choices: dict[int, ResumeChoice] = {}
        self.not_resumable_reason = _NOT_STARTED
        self.seed: int | None = None
        self.prompt_tokens = 0
        self.head: dict[str, Any] = {}
        self.revision = ""
        self.replay_filter = ReplayFilter()
        self._attempt_start: dict[int, Position] = {}
        self._kept_tokens: int | None = None
        self._regenerated: list[int] = []

    def attempt_started(self) -> None:
        """The next engine continues the response, after the output that is not pending."""
        self._attempt_start = {}
        self._kept_tokens, self._regenerated = None, []
        for index, choice in self.choices.items():
            tokens, chars, is_end_pending = self.replay_filter.get_pending(index)
            is_finished = choice.finish_reason is not None and not is_end_pending
            self._attempt_start[index] = Position(len(choice.token_ids) - tokens, choice.chars - chars, is_finished)

    def response_started(self, message: InferStarted | InferResponse, revision: str) -> None:
        """An engine has admitted the request, or continues it."""
        self.not_resumable_reason = message.fixed
        self.seed = message.seed
        self.prompt_tokens = message.prompt_tokens
        self.revision = revision
        if isinstance(message, InferResponse):
            self.head = message.resume_head or self.head
            self._kept_tokens = message.kept_tokens
            if self._kept_tokens is not None and self.replay_filter:
                self._expect_replaced(self._kept_tokens)
                self._kept_tokens = None

    def _expect_replaced(self, kept: int) -> None:
        """Expect the tokens after the first `kept` again, before the pending ones.

        Another reader of the response has resumed it. Pending output must be generated as it was.
        """
        for index, choice in self.choices.items():
            known = len(choice.token_ids) - self.replay_filter.get_pending(index)[0]
            self.replay_filter.expect_before(index, choice.token_ids[kept:known])

    def add(self, deltas: list[dict[str, Any]]) -> None:
        """Add `ChoiceDelta`s, as decoded from the wire."""
        for delta in deltas:
            index = delta.get("index", 0)
            choice = self.choices.get(index)
            if choice is None:
                choice = self.choices[index] = ResumeChoice()
            if self._kept_tokens is None:
                choice.token_ids += delta.get("token_ids", ())
            else:
                self._replace_tokens(self._kept_tokens, index, choice, delta)
            choice.chars += len(delta.get("text", ""))
            if finish := delta.get("finish_reason"):
                choice.finish_reason = finish

    def _replace_tokens(self, kept: int, index: int, choice: ResumeChoice, delta: dict[str, Any]) -> None:
        """Replace the tokens after the first `kept` by those generated in their place.

        Until the client has text of the new tokens, the old ones describe what it has.
        """
        self._regenerated += delta.get("token_ids", ())
        if delta.get("text") or delta.get("finish_reason"):
            choice.token_ids[kept:] = self._regenerated
            start = self._attempt_start.get(index, Position())
            self._attempt_start[index] = Position(kept, start.chars, start.is_finished)
            self._kept_tokens, self._regenerated = None, []

    @property
    def tokens(self) -> int:
        """Tokens generated so far, of all choices."""
        tokens = 0
        for choice in self.choices.values():
            tokens += len(choice.token_ids)
        return tokens

    def rewind(self, messages: Iterable[dict[str, Any]]) -> None:
        """Expect `messages`, which have been added, to be generated again."""
        self.replay_filter = self.replay_filter.preceded_by(messages)

    def rewind_to(self, messages: Iterable[dict[str, Any]]) -> None:
        """Expect the present attempt's output after `messages`, its first ones, once more."""
        positions = dict(self._attempt_start)
        for message in messages:
            for delta in message.get("choices") or message.get("progress") or ():
                index = delta.get("index", 0)
                positions[index] = positions.get(index, Position()).advance_by(delta)
        self.replay_filter = ReplayFilter()
        for index, choice in self.choices.items():
            kept = positions.get(index, Position())
            is_end_pending = choice.finish_reason is not None and not kept.is_finished
            self.replay_filter.expect(index, choice.token_ids[kept.tokens :], choice.chars - kept.chars, is_finished=is_end_pending)

    def resume_fields(self, prepared: str, *, keeps_partial_output: bool) -> dict[str, Any] | None:
        """Build the fields of a `Resume` message.

        Args:
            prepared: Name of the KV cache that the next engine has computed ahead.
            keeps_partial_output: The client keeps the text so far; otherwise it is sent again.

        Returns:
            The fields, or None if there is no output or no other engine can continue it.
        """
        if self.not_resumable_reason or not self.choices:
            return None
        return {
            "revision": self.revision,
            "choices": [self._choice_fields(index, choice, keeps_partial_output) for index, choice in sorted(self.choices.items())],
            "prompt_tokens": self.prompt_tokens,
            "seed": self.seed,
            "prepared": prepared,
            "head": self.head,
            "takes_kept_tokens": not self.replay_filter,  # pending output must be generated as it was
        }

    def _choice_fields(self, index: int, choice: ResumeChoice, keeps_partial_output: bool) -> dict[str, Any]:
        tokens, chars, is_end_pending = self.replay_filter.get_pending(index)
        return {
            "index": index,
            "token_ids": choice.token_ids[: len(choice.token_ids) - tokens],
            "text_chars": choice.chars - chars if keeps_partial_output else 0,
            "finish_reason": None if is_end_pending else choice.finish_reason,
        }
