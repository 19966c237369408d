"""When models are asked for, and what is brought ahead because of it. Both are known of this leader's term only."""

from __future__ import annotations

from services.scheduler.domain.values import value

GAIN = 0.3


@value(frozen=True, slots=True)
class Habit:
    """`count` times somebody began to wait for the model, the last time at `last`; `every`: seconds between them, and by how much that `varies`
    (moving means)."""

    model: str
    last: float
    count: int = 1
    every: float = 0.0
    varies: float = 0.0

    @property
    def key(self) -> str:
        return self.model

    def again(self, now: float) -> Habit:
        """Asked for once more."""
        distance = max(0.0, now - self.last)
        if self.count == 1:
            return Habit(self.model, now, 2, distance, distance / 2)
        off = abs(distance - self.every)
        return Habit(
            self.model, now, self.count + 1, self.every + GAIN * (distance - self.every), self.varies + GAIN * (off - self.varies)
        )


@value(frozen=True, slots=True)
class Prefetch:
    """Weights on their way to a node, for nobody yet."""

    model: str
    node: str
    weights_id: str
    since: float

    @property
    def key(self) -> str:
        return self.model
