"""Seconds that an engine computed for no request, by their cause (docs/adr/0097)."""

from __future__ import annotations

OWN = ""
"""Cause of work that no start of another model made necessary."""
_MAX_CAUSES = 64
"""Causes that are kept. A new cause replaces the one without work for longest, already reported."""


def add_background_seconds(by_cause: dict[str, float], cause: str, seconds: float) -> None:
    """Add the seconds of a cause, and forget a cause of long ago if there are too many.

    Args:
        by_cause: The sums, since the beginning. The causes without work for longest are first.
        cause: The plan that made the work necessary, or `OWN`.
        seconds: To add.
    """
    by_cause[cause] = by_cause.pop(cause, 0.0) + seconds  # moved to the end
    if len(by_cause) > _MAX_CAUSES:
        del by_cause[next(c for c in by_cause if c != OWN)]
