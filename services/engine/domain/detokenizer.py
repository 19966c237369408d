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
"""Over so many tokens a window without a clean beginning is cut where it does no harm."""


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
        # Bytes that are no character: show what no later token can change.
        end = len(self._window) - _UNDECIDED
        decided = self._decode(self._window[:end])
        return self._advance(end, decided) if text.startswith(decided) else ""

    def flush(self) -> str:
        """The rest, at the end of the text: an unfinished character shows as U+FFFD."""
        return self._advance(len(self._window), self._decode(self._window)) if self._shown < len(self._window) else ""

    def _advance(self, end: int, text: str) -> str:
        """Show `text`, which the window's tokens up to `end` make, and let the window begin where the last advance ended."""
        added = text[len(self._prefix) :]
        cut = self._shown
        if self._prefix.endswith(_REPLACEMENT):
            # That may be in the middle of a character, whose other half would be read as rubbish.
            cut = self._harmless_cut(end) if len(self._window) > _LONGEST else 0
        self._window = self._window[cut:]
        self._shown = end - cut
        self._prefix = self._decode(self._window[: self._shown]) if cut else text
        return added

    def _harmless_cut(self, end: int) -> int:
        whole = self._decode(self._window)
        for cut in range(end, 0, -1):
            if self._decode(self._window[:cut]) + self._decode(self._window[cut:]) == whole:
                return cut
        return 0
