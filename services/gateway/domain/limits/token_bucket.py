"""A token bucket: a rate per minute, with bursts up to one minute's amount."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 60.0


@dataclass(slots=True)
class TokenBucket:
    """Amount that may be used now; negative while more was used than allowed.

    Attributes:
        per_minute: Rate, and capacity.
        level: Amount at `updated_at`, in seconds of any monotonic clock.
    """

    per_minute: int
    level: float
    updated_at: float

    @classmethod
    def full(cls, per_minute: int, now: float) -> TokenBucket:
        return cls(per_minute, float(per_minute), now)

    def refill(self, now: float) -> None:
        """Add what was earned until `now`, which may be older than the last time."""
        earned = max(0.0, now - self.updated_at) * self.per_minute / WINDOW_S
        self.level = min(float(self.per_minute), self.level + earned)
        self.updated_at = max(self.updated_at, now)

    def resize(self, per_minute: int, now: float) -> None:
        """Change the rate; what was used stays used."""
        self.refill(now)
        self.level += per_minute - self.per_minute
        self.per_minute = per_minute

    def take(self, need: float, extra: float) -> float:
        """Take `need` and up to `extra` more; return what was taken: 0 if `need` is not there."""
        if self.level < need:
            return 0.0
        taken = need + min(extra, self.level - need)
        self.level -= taken
        return taken

    def charge(self, amount: float) -> None:
        """Take an amount that was used already, or return one that was not (negative)."""
        self.level = min(float(self.per_minute), self.level - amount)

    def wait_s(self, need: float) -> float:
        """Return the seconds until `need` is there."""
        return max(0.0, need - self.level) * WINDOW_S / self.per_minute

    @property
    def full_in_s(self) -> float:
        """Seconds until the bucket is full."""
        return self.wait_s(self.per_minute)
