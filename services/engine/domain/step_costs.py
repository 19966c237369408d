"""Device time of requests: the time of each step, split among its requests by tokens.

All time that the device spends on a model is charged, the time between the results of one step and
the next step included, as long as there are requests to charge it to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class StepCosts:
    """Seconds of the device that each open request has used.

    Attributes:
        background_s: Seconds for tokens of no request, such as prefill for migrations.
    """

    background_s: float = 0.0
    _by_request: dict[str, float] = field(default_factory=dict)
    _counted_until: float | None = None
    _carried_s: float = 0.0

    def begin(self, now: float) -> None:
        """A step begins; times are in seconds of one clock."""
        self._counted_until = now

    def split(self, now: float, tokens: Mapping[str, int], background: int = 0) -> None:
        """Charge the time since the beginning, or since the last split, by tokens.

        Args:
            now: The present time.
            tokens: Computed tokens by request.
            background: Computed tokens of no request.
        """
        total = sum(tokens.values()) + background
        if self._counted_until is None or not total:
            return
        spent = self._carried_s + now - self._counted_until
        self._counted_until, self._carried_s = now, 0.0
        self.background_s += spent * background / total
        for request_id, count in tokens.items():
            self._by_request[request_id] = self._by_request.get(request_id, 0.0) + spent * count / total

    def end(self, now: float, *, has_more: bool) -> None:
        """The step ends.

        Args:
            now: The present time.
            has_more: Requests are left, to which the time since the last split is charged.
        """
        if self._counted_until is not None:
            self._carried_s = self._carried_s + now - self._counted_until if has_more else 0.0
            self._counted_until = None

    def of_request(self, request_id: str) -> float:
        """Return the seconds of an open request so far."""
        return self._by_request.get(request_id, 0.0)

    def close(self, request_id: str) -> None:
        """A request ended. Unknown ids are ignored."""
        self._by_request.pop(request_id, None)
