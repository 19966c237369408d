"""Judge requests by the objectives of their models, and count them for the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.contracts.models import Slo
from shared.contracts.objectives import (
    MAX_MODELS_PER_REPORT,
    REPORT_LOST_AFTER_S,
    ObjectiveCounts,
    ObjectiveStanding,
    ReportObjectives,
)
from shared.errors import QueueFull, ThawError

_STANDING_REQUESTS = 1_024
"""Counts of a model are halved when this many requests have ended, so that recent ones have more
weight.
"""


def meets_objective(
    slo: Slo, ttft_s: float | None, tpot_s: float | None, duration_s: float, error: ThawError | None, *, has_client_left: bool
) -> bool | None:
    """Return whether a finished request met the objective; None: it does not count.

    1. A request does not count if its model has no objective, or if the client caused its error.
    2. A failed request, and one that the model's full queue refused, missed the objective.
    3. If the client left before the first token, the request missed the objective if the token was
       late already; otherwise it does not count.
    4. Any other request met the objective if the first token and the time per further token are
       within it. A response without tokens (embeddings) counts with its duration.

    Args:
        slo: The model's objective.
        ttft_s: Seconds from arrival to the first token; None: there was none.
        tpot_s: Seconds for each further token; None: there was none.
        duration_s: Seconds from arrival to the end.
        error: The error of a failed request.
        has_client_left: True if the client disconnected before the end.
    """
    if not slo.is_set:  # 1
        return None
    if error is not None and not has_client_left:  # 1, 2
        return False if error.status >= 500 or isinstance(error, QueueFull) else None
    first_s = duration_s if ttft_s is None else ttft_s
    is_late = slo.ttft is not None and first_s > slo.ttft
    if has_client_left and ttft_s is None:  # 3
        return False if is_late else None
    return not is_late and (slo.tpot is None or tpot_s is None or tpot_s <= slo.tpot)  # 4


@dataclass
class _Count:
    total: int = 0
    met: int = 0


@dataclass
class ObjectiveCounter:
    """Counts of one gateway since its last acknowledged report.

    Memory is bounded by the number of models.
    """

    gateway_id: str
    _counts: dict[str, _Count] = field(default_factory=dict)
    _standings: dict[str, _Count] = field(default_factory=dict)
    _number: int = 0
    _in_flight: ReportObjectives | None = None
    _first_sent_at: float = 0.0

    def count(self, model: str, *, is_met: bool) -> None:
        known = self._counts.setdefault(model, _Count())
        known.total += 1
        known.met += is_met
        standing = self._standings.setdefault(model, _Count())
        standing.total += 1
        standing.met += is_met
        if standing.total >= _STANDING_REQUESTS:
            standing.total, standing.met = standing.total // 2, standing.met // 2

    def standing(self, model: str) -> ObjectiveStanding | None:
        """Return the counts that accompany the model's requests; None: no request has ended."""
        found = self._standings.get(model)
        return ObjectiveStanding(gateway=self.gateway_id, total=found.total, met=found.met) if found is not None else None

    def next_report(self, now: float) -> ReportObjectives | None:
        """Return the report to send: the last one until it is acknowledged, then the new counts.

        Args:
            now: Monotonic seconds.
        """
        if self._in_flight is not None and now - self._first_sent_at < REPORT_LOST_AFTER_S:
            return self._in_flight
        self._in_flight = None
        if not self._counts:
            return None
        models = list(self._counts)[:MAX_MODELS_PER_REPORT]
        counts = tuple(ObjectiveCounts(model=m, total=c.total, met=c.met) for m in models for c in [self._counts.pop(m)])
        self._number += 1
        self._first_sent_at = now
        self._in_flight = ReportObjectives(gateway=self.gateway_id, number=self._number, counts=counts)
        return self._in_flight

    def acknowledge(self, number: int) -> None:
        if self._in_flight is not None and self._in_flight.number == number:
            self._in_flight = None
