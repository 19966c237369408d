"""One sequence from its first generated token to its end: text, stop conditions and finish reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from services.engine.domain.detokenizer import Detokenizer
from services.engine.domain.sampling_params import Ending
from services.engine.domain.stop_strings import StopMatcher


@dataclass(frozen=True)
class Gained:
    """What one token added to what the client sees."""

    text: str
    finish_reason: Literal["stop", "length"] | None = None


class Generation:
    """Turns tokens into shown text and knows when it is over."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int], ending: Ending) -> None:
        self._text = Detokenizer(decode, prompt)
        self._stops = StopMatcher(ending.stops)
        self._ending = ending
        self._ahead = 0
        self.count = 0

    def resume(self, tokens: Sequence[int], said: int, before: str = "") -> Gained:
        """Take on `tokens`, of whose text, `before` ahead of it, `said` characters are out already; what is owed of the rest. If another
        engine has shown more than would be shown here, what comes next is left out that much."""
        texts, reason = [before], None
        for token in tokens:
            gained = self._feed(token)
            texts.append(gained.text)
            if (reason := gained.finish_reason) is not None:
                break
        text = "".join(texts)
        self._ahead = max(0, said - len(text))
        return Gained(text[said:], reason)

    def feed(self, token: int) -> Gained:
        gained = self._feed(token)
        if self._ahead:
            shown = gained.text[self._ahead :]
            self._ahead = max(0, self._ahead - len(gained.text))
            return Gained(shown, gained.finish_reason)
        return gained

    def _feed(self, token: int) -> Gained:
        self.count += 1
        if token in self._ending.stop_token_ids:
            return self._end(self._stops.feed(self._text.flush()), "stop")
        shown = self._stops.feed(self._text.feed(token))
        if self._stops.matched is not None:
            return Gained(shown, "stop")
        if self.count >= self._ending.max_tokens:
            return self._end(shown + self._stops.feed(self._text.flush()), "length")
        return Gained(shown)

    def _end(self, shown: str, reason: Literal["stop", "length"]) -> Gained:
        if self._stops.matched is not None:
            return Gained(shown, "stop")
        return Gained(shown + self._stops.flush(), reason)
