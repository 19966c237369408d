"""The loop's clock: starts at Unix time and is monotonic."""

from __future__ import annotations

import time

_START = time.time() - time.monotonic()


def now() -> float:
    """Return seconds: Unix time at the process's start plus monotonic time since."""
    return _START + time.monotonic()


def hour() -> int:
    """Return the present hour, in hours since 1970."""
    return int(time.time() // 3600)
