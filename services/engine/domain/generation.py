"""Generation of one sequence: text, stop conditions and finish reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from services.engine.domain.detokenizer import Detokenizer
from services.engine.domain.sampling_params import StopConditions
from services.engine.domain.stop_strings import StopMatcher


@dataclass(frozen=True)
class TokenText:
    """Text that a token adds to the response."""

    text: str
    finish_reason: Literal["stop", "length"] | None = None


class Generation:
    """Turns tokens into visible text and detects the end of the response."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int], stop_conditions: StopConditions) -> None:
        self._text = Detokenizer(decode, prompt)
        self._stops = StopMatcher(stop_conditions.stops)
        self._ending = stop_conditions
        self._skip_chars = 0
        self.count = 0

    def resume(self, tokens: Sequence[int], sent_chars: int, prefix: str = "") -> TokenText:
        """Continue from tokens that another engine generated.

        If the other engine sent more text than this one would have sent, the next tokens' text is
        shortened accordingly.

        Args:
            tokens: Generated token ids.
            sent_chars: Characters that the client has received.
            prefix: Text before the first token, such as an echoed prompt.

        Returns:
            The text of `tokens` that has not been sent, with the finish reason if they complete the
            response.
        """
        texts, reason = [prefix], None
        for token in tokens:
            added = self._feed(token)
            texts.append(added.text)
            if (reason := added.finish_reason) is not None:
                break
        text = "".join(texts)
        self._skip_chars = max(0, sent_chars - len(text))
        return TokenText(text[sent_chars:], reason)

    def feed(self, token: int) -> TokenText:
        added = self._feed(token)
        if self._skip_chars:
            shown = added.text[self._skip_chars :]
            self._skip_chars = max(0, self._skip_chars - len(added.text))
            return TokenText(shown, added.finish_reason)
        return added

    def _feed(self, token: int) -> TokenText:
        self.count += 1
        if token in self._ending.stop_token_ids:
            return self._end(self._stops.feed(self._text.flush()), "stop")
        shown = self._stops.feed(self._text.feed(token))
        if self._stops.matched is not None:
            return TokenText(shown, "stop")
        if self.count >= self._ending.max_tokens:
            return self._end(shown + self._stops.feed(self._text.flush()), "length")
        return TokenText(shown)

    def _end(self, shown: str, reason: Literal["stop", "length"]) -> TokenText:
        if self._stops.matched is not None:
            return TokenText(shown, "stop")
        return TokenText(shown + self._stops.flush(), reason)
