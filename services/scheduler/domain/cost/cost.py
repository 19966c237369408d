"""A predicted start, by phase. Phases that overlap count once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Way = Literal["ready", "wake", "restore", "reuse", "load", "peer_copy", "pipeline"]
"""How a model becomes ready on a device set: it is; from sleep; from a snapshot; the missing tensors loaded; all of it loaded (from DRAM, SSD or
remote); copied from another device; its layers over several devices."""
Clearing = Literal["none", "leaving", "evict", "suspend", "preempt", "migrate"]
"""What must happen there first: nothing; those on their way out must be out; idle ones leave (for good, or to a snapshot); serving ones are
interrupted and begin again elsewhere; serving ones move elsewhere with their tokens."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds. `total` is the critical path over `phases`, which may overlap; `spread` the parameters' learned mean absolute error."""

    total: float
    phases: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0
