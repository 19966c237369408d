"""Incremental detokenization that never splits a character.

Decoders are not concatenative: a token may be half a character, and the first token of a text may
lose its leading space. So text is decoded in a window that starts at an earlier token boundary, and
the difference is the new text, as in vLLM. The window moves with every complete character, so the
cost of a token does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_CONTEXT = 6
"""Prompt tokens in the first window, so that the first generated token is decoded as a
continuation.
"""
_UNDECIDED = 4
"""Tokens that may belong to an unfinished character: it has at most four bytes, and a token at
least one.
"""
_LONGEST = 24
"""A window of more tokens without a clean start is cut where the text does not change."""


class Detokenizer:
    """Turns one token after another into text.

    Args:
        decode: Turns token ids into text, with U+FFFD for bytes that form no character.
        prompt: The tokens before the output.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt[-_CONTEXT:])
        self._shown = len(self._window)
        self._prefix = decode(self._window) if self._window else ""

    def feed(self, token: int) -> str:
        """Text that is final after `token`; empty while a character is incomplete."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(_REPLACEMENT):
            return self._advance(len(self._window), text)
        if len(self._window) - self._shown <= _UNDECIDED:
            return ""
        # Bytes that form no character: show the text that no later token can change.
        end = len(self._window) - _UNDECIDED
        decided = self._decode(self._window[:end])
        return self._advance(end, decided) if text.startswith(decided) else ""

    def flush(self) -> str:
        """The remaining text at the end; an unfinished character shows as U+FFFD."""
        return self._advance(len(self._window), self._decode(self._window)) if self._shown < len(self._window) else ""

    def _advance(self, end: int, text: str) -> str:
        """Show `text` of the window's tokens up to `end`, and move the window.

        The new window starts at the end of the previous advance.
        """
        added = text[len(self._prefix) :]
        cut = self._shown
        if self._prefix.endswith(_REPLACEMENT):
            # The cut may be in the middle of a character, whose other half would decode to garbage.
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
