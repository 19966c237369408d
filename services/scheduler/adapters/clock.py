"""The loop's clock: reads like Unix time, never goes back."""

from __future__ import annotations

import time

_START = time.time() - time.monotonic()


def now() -> float:
    """Seconds: Unix time when the process started plus monotonic time since."""
    return _START + time.monotonic()
