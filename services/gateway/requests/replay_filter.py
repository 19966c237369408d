"""Removal of regenerated output that a client has already received.

A replay of an idempotent request may forward more of an engine's output than the owner of the
key had received when it handed the request off. The next engine generates that output again; the
filter removes it, and requires it to be identical token for token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from services.gateway.requests.sink import Diverged


@dataclass(slots=True)
class _Choice:
    """Output of one choice that is still expected to arrive again."""

    token_ids: list[int] = field(default_factory=list)
    chars: int = 0
    is_finished: bool = False

    @property
    def is_pending(self) -> bool:
        return bool(self.token_ids or self.chars or self.is_finished)


class ReplayFilter:
    """Output that was forwarded and will be generated again; true while any is pending."""

    def __init__(self, messages: Iterable[dict[str, Any]] = ()) -> None:
        """Expect the output of `messages`, which were forwarded, to be generated again."""
        self._choices: dict[int, _Choice] = {}
        for message in messages:
            for delta in message.get("choices") or message.get("progress") or ():
                choice = self._choices.setdefault(delta.get("index", 0), _Choice())
                choice.token_ids += delta.get("token_ids", ())
                choice.chars += len(delta.get("text", ""))
                choice.is_finished = choice.is_finished or bool(delta.get("finish_reason"))

    def expect(self, index: int, token_ids: Iterable[int], chars: int, *, is_finished: bool) -> None:
        """Expect output of a choice to be generated again."""
        self._choices[index] = _Choice(list(token_ids), chars, is_finished)

    def expect_before(self, index: int, token_ids: Iterable[int]) -> None:
        """Expect tokens of a choice before what is pending of it."""
        choice = self._choices.setdefault(index, _Choice())
        choice.token_ids[:0] = token_ids

    def preceded_by(self, messages: Iterable[dict[str, Any]]) -> ReplayFilter:
        """Return a filter for the output of `messages`, then what is pending here."""
        combined = ReplayFilter(messages)
        for index, choice in self._choices.items():
            first = combined._choices.setdefault(index, _Choice())
            first.token_ids += choice.token_ids
            first.chars += choice.chars
            first.is_finished = first.is_finished or choice.is_finished
        return combined

    def get_pending(self, index: int) -> tuple[int, int, bool]:
        """Return a choice's pending tokens, pending characters, and whether its end is."""
        choice = self._choices.get(index, _Choice())
        return len(choice.token_ids), choice.chars, choice.is_finished

    def __bool__(self) -> bool:
        return any(c.is_pending for c in self._choices.values())

    def remove_from(self, deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the new part of `deltas`. Raises `Diverged`."""
        return [rest for delta in deltas if (rest := self._new_part(delta)) is not None]

    def covers(self, deltas: list[dict[str, Any]]) -> bool:
        """True if all of `deltas` is pending; marks it as received.

        Raises:
            Diverged: Some of it is pending and some is new.
        """
        rest = self.remove_from(deltas)
        if rest and rest != deltas:
            raise Diverged("the next engine splits its output differently from what was forwarded")
        return not rest

    def _new_part(self, delta: dict[str, Any]) -> dict[str, Any] | None:
        choice = self._choices.get(delta.get("index", 0))
        if choice is None or not choice.is_pending:
            return delta
        ids, text = list(delta.get("token_ids", ())), delta.get("text", "")
        known = min(len(ids), len(choice.token_ids))
        if ids[:known] != choice.token_ids[:known]:
            raise Diverged("the next engine generates other tokens than were forwarded")
        chars = min(len(text), choice.chars)
        del choice.token_ids[:known]
        choice.chars -= chars
        rest = {**delta, "token_ids": ids[known:], "text": text[chars:]}
        if delta.get("logprobs"):
            rest["logprobs"] = delta["logprobs"][known:]
        if delta.get("finish_reason") and choice.is_finished:
            rest["finish_reason"], choice.is_finished = None, False
        return rest if rest["token_ids"] or rest["text"] or rest.get("finish_reason") else None
