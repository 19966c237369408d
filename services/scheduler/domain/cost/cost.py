"""A predicted start, by phase. Phases that overlap count once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from services.scheduler.domain.values import value
from shared.contracts.plans import Clearing as Clearing
from shared.contracts.plans import ReadyBy

Way = ReadyBy


@value(frozen=True, slots=True)
class Cost:
    """Seconds. `total` is the critical path over `phases`, which may overlap; `spread` the parameters' learned mean absolute error."""

    total_s: float
    phases: Mapping[str, float] = field(default_factory=dict)
    spread_s: float = 0.0
