"""Price the reload of a unit: bytes, the tier that they would come from, and how likely it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

from weights.store.pages import Cost, StoredUnit

Tier = Literal["dram", "ssd", "remote"]
SECONDS_PER_GB = {"dram": 0.1, "ssd": 0.7, "remote": 8.0}
"""Typical seconds for 10^9 bytes from each tier. Only their ratios matter: memory at 10 GB/s, a
disk at 1.4 GB/s, 1 Gbit/s from elsewhere.
"""
LEAST_LIKELY = 0.001
"""Likelihood of weights without expected demand: bytes and tier still order them."""
Likelihood = Callable[[StoredUnit], float]
"""The likelihood that a unit is loaded again soon, compared with others."""


def equally_likely(_: StoredUnit) -> float:
    """Return 1 for every unit: nothing is known of the demand."""
    return 1.0


def expected_loads(expected: Mapping[str, float], users: Callable[[str], Collection[str]]) -> Likelihood:
    """Return the likelihood of a unit: the expected number of loads of the weights that contain it.

    Args:
        expected: Likelihood of a load by weights id, times latency sensitivity (p · alpha of
            Tangram Eq. 2).
        users: Returns the weights that contain a unit, by its key.
    """

    def likelihood(unit: StoredUnit) -> float:
        return max(LEAST_LIKELY, sum(expected.get(w, 0.0) for w in {*users(unit.key), unit.model}))

    return likelihood


def reload_cost(tier_of: Callable[[str], Tier], likelihood: Likelihood = equally_likely) -> Cost:
    """Return the expected seconds to load a unit again (Tangram Eq. 2).

    Args:
        tier_of: The tier that a model's bytes would come from, by `StoredUnit.model`.
        likelihood: Relative likelihood of the unit's next load.
    """

    def cost(unit: StoredUnit) -> float:
        return unit.nbytes / 1e9 * SECONDS_PER_GB[tier_of(unit.model)] * likelihood(unit)

    return cost
