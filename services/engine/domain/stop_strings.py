"""Stop strings in a stream of text: they may span tokens, and no part of one that ends the answer may be shown before."""

from __future__ import annotations


class StopMatcher:
    """Fed with text as it is generated; gives back what may be shown. With no stop strings it passes everything on."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What of all that was fed so far may be shown now. After a match (`matched` says which) nothing more comes."""
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
        """The answer ended otherwise: what was held back for fear of a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` (and is shorter than it)."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
