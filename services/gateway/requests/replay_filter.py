"""What the follower of an Idempotency-Key has passed on of an engine's words beyond the place where its owner had the answer go on elsewhere.

The next engine says that again, and it is left out: token for token the same, or the answer cannot be gone on with here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from services.gateway.requests.sink import Diverged


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    chars: int = 0
    finished: bool = False

    @property
    def left(self) -> bool:
        return bool(self.token_ids or self.chars or self.finished)


class Surplus:
    """Made of the messages that were heard too many."""

    def __init__(self, messages: Iterable[dict[str, Any]] = ()) -> None:
        self._choices: dict[int, _Choice] = {}
        for message in messages:
            for delta in message.get("choices") or message.get("progress") or ():
                choice = self._choices.setdefault(delta.get("index", 0), _Choice())
                choice.token_ids += delta.get("token_ids", ())
                choice.chars += len(delta.get("text", ""))
                choice.finished = choice.finished or bool(delta.get("finish_reason"))

    def after(self, messages: Iterable[dict[str, Any]]) -> Surplus:
        """What is left of this, and before it what `messages` said."""
        made = Surplus(messages)
        for index, choice in self._choices.items():
            first = made._choices.setdefault(index, _Choice())
            first.token_ids += choice.token_ids
            first.chars += choice.chars
            first.finished = first.finished or choice.finished
        return made

    def of(self, index: int) -> tuple[int, int, bool]:
        """Tokens and characters of a choice, and whether its end is among it."""
        choice = self._choices.get(index, _Choice())
        return len(choice.token_ids), choice.chars, choice.finished

    def __bool__(self) -> bool:
        return any(c.left for c in self._choices.values())

    def without(self, deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`deltas` as far as they are new. Raises `Diverged`."""
        return [rest for delta in deltas if (rest := self._rest(delta)) is not None]

    def covers(self, deltas: list[dict[str, Any]]) -> bool:
        """Whether nothing of `deltas` is new, which is then taken for heard. Raises `Diverged` if some of it is and some is not."""
        rest = self.without(deltas)
        if rest and rest != deltas:
            raise Diverged("the next engine's words are cut otherwise than those that were heard")
        return not rest

    def _rest(self, delta: dict[str, Any]) -> dict[str, Any] | None:
        choice = self._choices.get(delta.get("index", 0))
        if choice is None or not choice.left:
            return delta
        ids, text = list(delta.get("token_ids", ())), delta.get("text", "")
        known = min(len(ids), len(choice.token_ids))
        if ids[:known] != choice.token_ids[:known]:
            raise Diverged("it went on elsewhere, and with other tokens than were passed on here")
        chars = min(len(text), choice.chars)
        del choice.token_ids[:known]
        choice.chars -= chars
        rest = {**delta, "token_ids": ids[known:], "text": text[chars:]}
        if delta.get("logprobs"):
            rest["logprobs"] = delta["logprobs"][known:]
        if delta.get("finish_reason") and choice.finished:
            rest["finish_reason"], choice.finished = None, False
        return rest if rest["token_ids"] or rest["text"] or rest.get("finish_reason") else None
