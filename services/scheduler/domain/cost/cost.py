"""The predicted cost of a start, by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from services.scheduler.domain.values import value
from shared.contracts.plans import Clearing as Clearing
from shared.contracts.plans import ReadyBy

Way = ReadyBy


@value(frozen=True, slots=True)
class Cost:
    """Seconds.

    Attributes:
        total_s: The critical path over `phases`.
        phases: Seconds by phase; phases may overlap.
        spread_s: The learned mean absolute error of the parameters.
    """

    total_s: float
    phases: Mapping[str, float] = field(default_factory=dict)
    spread_s: float = 0.0
