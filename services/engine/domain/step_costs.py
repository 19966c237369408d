"""Device time of requests: the time of each step, split among its requests by tokens.

All time that the device spends on a model is charged, as long as there are requests to charge it
to. That includes the time between the results of one step and the beginning of the next one. Work
of no request is counted by its cause (docs/adr/0097). Requests and causes together therefore have
the time of all steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.engines.background_seconds import OWN, add_background_seconds

_NOTHING: Mapping[str, int] = {}


@dataclass(slots=True)
class StepCosts:
    """Seconds of the device that each open request has used.

    Attributes:
        background_s: Seconds of work that is charged to no request, since the beginning, by its
            cause: the plan that needed memory, or `OWN`.
    """

    background_s: dict[str, float] = field(default_factory=dict)
    closed_s: float = 0.0
    """Seconds of ended requests that were reported to their gateways."""
    _by_request: dict[str, float] = field(default_factory=dict)
    """Seconds charged to each open request."""
    _reported: dict[str, float] = field(default_factory=dict)
    """The part of `_by_request` that the request's gateway knows."""
    _tokens: dict[str, int] = field(default_factory=dict)
    """Computed tokens of each open request, recomputed ones included."""
    _credits: dict[str, float] = field(default_factory=dict)
    """Seconds that others have paid in advance for the tokens that a request computes again."""
    _unused_credits_s: float = 0.0
    """Credits of requests that have ended. They reduce the cost of the next steps."""
    _counted_until: float | None = None
    """The time up to which the present step is charged; None: between steps."""
    _carried_s: float = 0.0
    """Seconds after the last split of earlier steps, which the next split charges."""
    _is_charged: bool = False
    """The present step had a split."""

    @property
    def prepaid_s(self) -> float:
        """Seconds that are charged in advance: later steps charge so much less."""
        return self._unused_credits_s + sum(self._credits.values())

    @property
    def charged_s(self) -> float:
        """Seconds that are charged to requests, open ones included."""
        return self.closed_s + sum(self._by_request.values())

    def begin(self, now: float) -> None:
        """Begin a step. All times are seconds of the same clock."""
        self._counted_until, self._is_charged = now, False

    def split(self, now: float, tokens: Mapping[str, int], background: Mapping[str, int] = _NOTHING) -> None:
        """Charge the time since the beginning, or since the last split, by tokens.

        Args:
            now: The present time.
            tokens: Computed tokens by request.
            background: Computed tokens of no request, by cause.
        """
        total = sum(tokens.values()) + sum(background.values())
        if self._counted_until is None or not total:
            return
        spent = self._carried_s + now - self._counted_until
        self._counted_until, self._carried_s, self._is_charged = now, 0.0, True
        paid = min(spent, self._unused_credits_s)
        self._unused_credits_s -= paid
        spent -= paid
        for cause, count in background.items():
            add_background_seconds(self.background_s, cause, spent * count / total)
        for request_id, count in tokens.items():
            share = spent * count / total
            paid = min(share, self._credits.get(request_id, 0.0))
            if paid:
                self._credits[request_id] -= paid
            self._by_request[request_id] = self._by_request.get(request_id, 0.0) + share - paid
            self._tokens[request_id] = self._tokens.get(request_id, 0) + count

    def charge_preemption(self, victim: str, lost_tokens: int, payers: Mapping[str, int]) -> None:
        """Charge the cost of a victim's lost tokens to the requests that took its memory.

        The victim gets the same amount as a credit: it is not charged again for these tokens.

        Args:
            victim: The request that lost its keys and values.
            lost_tokens: Number of tokens whose keys and values it lost.
            payers: Open requests that needed the memory, with their weights.
        """
        others = {request_id: weight for request_id, weight in payers.items() if request_id != victim}
        total, computed = sum(others.values()), self._tokens.get(victim, 0)
        if not total or not computed:
            return
        cost = (self._by_request[victim] - self._credits.get(victim, 0.0)) * min(1.0, lost_tokens / computed)
        if cost <= 0:
            return
        self._credits[victim] = self._credits.get(victim, 0.0) + cost
        for request_id, weight in others.items():
            self._by_request[request_id] = self._by_request.get(request_id, 0.0) + cost * weight / total

    def end(self, now: float, *, has_more: bool) -> bool:
        """End the step. Return True if `split` has charged it.

        Args:
            now: The present time.
            has_more: Requests are left. The next step's first split charges them for the time since
                this step's last one.
        """
        if self._counted_until is not None:
            rest, self._counted_until = now - self._counted_until, None
            if has_more:
                self._carried_s += rest
            else:
                if left := self._carried_s + (rest if self._is_charged else 0.0):
                    add_background_seconds(self.background_s, OWN, left)
                self._carried_s = 0.0
        return self._is_charged

    def report(self, request_id: str) -> float:
        """Return the seconds of an open request so far, and count them as sent to its gateway."""
        seconds = self._by_request.get(request_id, 0.0)
        self._reported[request_id] = seconds
        return seconds

    def close(self, request_id: str) -> None:
        """Close an ended request; an unknown one is ignored.

        Seconds that were not reported to its gateway become work of no request.
        """
        self._tokens.pop(request_id, None)
        self._unused_credits_s += self._credits.pop(request_id, 0.0)
        reported = self._reported.pop(request_id, 0.0)
        self.closed_s += reported
        unreported = self._by_request.pop(request_id, 0.0) - reported
        if unreported > 0:
            add_background_seconds(self.background_s, OWN, unreported)
