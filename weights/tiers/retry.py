"""Decide how often and when a failed request is repeated."""

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
    """Exponential backoff of retries, half of each pause at random.

    A server's Retry-After takes precedence, up to `most_asked_s`.

    Attributes:
        attempts: Consecutive attempts without a byte gained.
        first_s: Seconds before the first retry; doubled for each further one.
        most_s: Longest pause in seconds.
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
    """Return the seconds that a Retry-After header asks for; 0 if missing or invalid.

    Args:
        retry_after: A number of seconds, or an HTTP date.
        now: Unix seconds.
    """
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
