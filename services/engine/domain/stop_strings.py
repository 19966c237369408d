"""Stop strings in a stream of text.

They may span tokens, and no part of a match may be shown.
"""

from __future__ import annotations


class StopMatcher:
    """Holds back text that may be the start of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that may be shown now.

        After a match (`matched`) the result is always empty.
        """
        if self.matched is not None:
            return ""
        pending = self._held + text
        found = [(at, stop) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda f: (f[0], -len(f[1])))
            self._held = ""
            return pending[:at]
        keep = max((_overlap(pending, stop) for stop in self._stops), default=0)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """The held-back text, when the response ends without a match."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
