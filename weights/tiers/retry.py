"""How often and when a failed request is made again."""

from __future__ import annotations

import email.utils
import http.client
import random
import threading
import time
from dataclasses import dataclass

from weights.tiers.port import Cancelled

RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
FAULTS = (OSError, http.client.HTTPException)


@dataclass(frozen=True)
class Backoff:
    """`attempts` in a row without a byte gained; between them `first_s`, doubled each time up to `most_s`, half of it at random.

    A server's Retry-After goes before, up to `most_asked_s`.
    """

    attempts: int = 6
    first_s: float = 0.2
    most_s: float = 10.0
    most_asked_s: float = 60.0

    def pause(self, failures: int, asked: str | None, cancelled: threading.Event | None) -> None:
        """Wait before the attempt that follows `failures` failed ones. Raises `Cancelled`."""
        wanted = min(self.most_s, self.first_s * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)
        seconds = max(wanted, min(asked_seconds(asked, time.time()), self.most_asked_s))
        if (cancelled or threading.Event()).wait(seconds):
            raise Cancelled


def asked_seconds(retry_after: str | None, now: float) -> float:
    """Seconds that a Retry-After header asks for (a number, or an HTTP date); 0 for none or nonsense. `now` in Unix seconds."""
    if retry_after is None:
        return 0.0
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - now)
    except (ValueError, OverflowError):
        return 0.0
