"""Token ids to text, one at a time, without ever splitting a character.

Decoders are not concatenative: a token may be half a character, and the first token of a text may lose its leading space. So text is always
decoded in a window that begins at an earlier token boundary, and the difference is what a token added (as vLLM does it). The window moves on with
every whole character, so the cost of a token does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_CONTEXT = 6
"""Tokens of the prompt that the window begins with, so that the first token is seen as a continuation."""
_UNDECIDED = 4
"""Tokens that can still belong to an unfinished character: it has four bytes at most, and a token one at least."""
_LONGEST = 24
"""A window longer than this without a decision is closed, come what may."""


class Detokenizer:
    """`decode` turns token ids into text, with U+FFFD for bytes that are no character."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt[-_CONTEXT:])
        self._shown = len(self._window)
        self._prefix = decode(self._window) if self._window else ""

    def feed(self, token: int) -> str:
        """The text that is certain after `token`; "" while a character is incomplete."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(_REPLACEMENT):
            return self._advance(len(self._window), text)
        if len(self._window) - self._shown <= _UNDECIDED:
            return ""
        return self._advance_decided(text)

    def flush(self) -> str:
        """The rest, at the end of the text: an unfinished character shows as U+FFFD."""
        text = self._decode(self._window) if self._shown < len(self._window) else self._prefix
        return self._advance(len(self._window), text)

    def _advance(self, end: int, text: str) -> str:
        """Show `text`, which tokens up to `end` of the window make, and move the window on."""
        added = text[len(self._prefix) :]
        self._window = self._window[self._shown :] if end > self._shown else self._window
        end -= self._shown if end > self._shown else 0
        self._shown = end
        self._prefix = self._decode(self._window[:end])
        return added

    def _advance_decided(self, text: str) -> str:
        """Bytes that are no character: show what no later token can change."""
        end = len(self._window) - _UNDECIDED
        decided = self._decode(self._window[:end])
        if text.startswith(decided) or len(self._window) - self._shown > _LONGEST:
            return self._advance(end, decided)
        return ""
