"""Times of requests for models, and prefetches in progress, for one term only."""

from __future__ import annotations

from services.scheduler.domain.state.pulls import Tier
from services.scheduler.domain.values import value

GAIN = 0.3


@value(frozen=True, slots=True)
class UsageHistory:
    """Arrivals at a model without waiting requests.

    Attributes:
        mean_interval_s: Moving mean of the time between arrivals.
        deviation_s: Moving mean of its deviation from that mean.
    """

    model: str
    last_used_at: float
    count: int = 1
    mean_interval_s: float = 0.0
    deviation_s: float = 0.0

    @property
    def key(self) -> str:
        return self.model

    def used_at(self, now: float) -> UsageHistory:
        """Return the history after one more arrival at `now`."""
        distance = max(0.0, now - self.last_used_at)
        if self.count == 1:
            return UsageHistory(self.model, now, 2, distance, distance / 2)
        off = abs(distance - self.mean_interval_s)
        return UsageHistory(
            self.model,
            now,
            self.count + 1,
            self.mean_interval_s + GAIN * (distance - self.mean_interval_s),
            self.deviation_s + GAIN * (off - self.deviation_s),
        )


@value(frozen=True, slots=True)
class Prefetch:
    """Weights that are being prefetched to a tier of a node, by the command with that `token`."""

    model: str
    node: str
    weights_id: str
    tier: Tier
    since: float
    token: int

    @property
    def key(self) -> str:
        return self.model
