"""Price the reload of a unit: bytes, the tier that they would come from, and how likely it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from weights.store.pages import Cost, StoredUnit

Tier = Literal["dram", "ssd", "remote"]
SECONDS_PER_GB = {"dram": 0.1, "ssd": 0.7, "remote": 8.0}
"""Typical seconds for 10^9 bytes from each tier. Only their ratios matter: memory at 10 GB/s, a
disk at 1.4 GB/s, 1 Gbit/s from elsewhere.
"""


def equally_likely(_: str) -> float:
    """Return 1 for every model: the scheduler supplies no likelihoods yet."""
    return 1.0


def reload_cost(tier_of: Callable[[str], Tier], likelihood: Callable[[str], float] = equally_likely) -> Cost:
    """Return the expected seconds to load a unit again (Tangram Eq. 2).

    Args:
        tier_of: The tier that a model's bytes would come from, by `StoredUnit.model`.
        likelihood: Relative likelihood of the model's next load.
    """

    def cost(unit: StoredUnit) -> float:
        return unit.nbytes / 1e9 * SECONDS_PER_GB[tier_of(unit.model)] * likelihood(unit.model)

    return cost
