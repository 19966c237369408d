"""The model's distance from its objective, as gateways report it with requests."""

from __future__ import annotations

from shared.compliance import required_requests
from shared.contracts.objectives import ObjectiveStanding

_MAX_GATEWAYS = 64
"""The counts of the gateways that sent the last requests are kept."""


class Standings:
    """The latest counts of each gateway."""

    def __init__(self, percentile: float) -> None:
        """Create it without counts.

        Args:
            percentile: The share of requests that should meet the objective.
        """
        self._percentile = percentile
        self._counts: dict[str, tuple[int, int]] = {}

    def record(self, standing: ObjectiveStanding) -> float:
        """Replace the gateway's counts, and return the model's RRC."""
        self._counts.pop(standing.gateway, None)
        self._counts[standing.gateway] = standing.total, min(standing.met, standing.total)
        while len(self._counts) > _MAX_GATEWAYS:
            del self._counts[next(iter(self._counts))]
        total, met = (sum(column) for column in zip(*self._counts.values(), strict=True))
        return required_requests(total, met, self._percentile)
