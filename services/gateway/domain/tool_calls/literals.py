"""Find the first of several markers in a text that arrives in parts."""

from __future__ import annotations

from collections.abc import Sequence

NO_JSON = "<`"
"""Beginnings of markers, which no JSON has outside of its strings."""


class LiteralScanner:
    """Follows a text by character. No marker may be the beginning of another one.

    Attributes:
        pending: Text that may be the beginning of a marker.
    """

    def __init__(self, literals: Sequence[str]) -> None:
        self._literals = tuple(literal for literal in literals if literal)
        self.pending = ""

    def feed(self, char: str) -> tuple[str, str]:
        """Return the text that is no part of a marker, and the marker that `char` completes.

        Each is empty if there is none.
        """
        text = self.pending + char
        begin = 0
        while begin < len(text) and not any(literal.startswith(text[begin:]) for literal in self._literals):
            begin += 1
        self.pending = text[begin:]
        if self.pending in self._literals:
            found, self.pending = self.pending, ""
            return text[:begin], found
        return text[:begin], ""

    def take(self) -> str:
        """Return `pending`, and forget it."""
        text, self.pending = self.pending, ""
        return text
