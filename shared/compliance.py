"""Which models comply with their objectives, and which go first (Torpor §5.2, Appendix A.3).

RRC of a model is the number of requests that have to meet the objective in a row until the model
complies. The paper states the scale factor 2 and the threshold 0.04 (Algorithm 2). It states
neither the period nor the first alpha, and from an alpha near 0 doubling recovers slowly: the first
alpha, the period and the floor are Thaw's choice.
"""

from __future__ import annotations

from collections.abc import Mapping

SCALE = 2.0
THRESHOLD = 0.04
FIRST_ALPHA = 0.5
"""Thaw's choice: the middle."""
FLOOR = 1 / 64
"""Thaw's choice: six doublings lead back to 1."""
PERIOD_S = 10.0
"""Thaw's choice: a function with 6 requests a minute appears once in a period."""


def required_requests(total: int, met: int, percentile: float) -> float:
    """Return RRC = (p·n - m) / (1 - p); 0 or less: the model complies.

    Args:
        total: Requests so far, n.
        met: The part of them that met the objective, m.
        percentile: The share that should meet it, p.
    """
    return (percentile * total - met) / (1.0 - percentile)


def low_priority(required: Mapping[str, float], alpha: float) -> frozenset[str]:
    """Return the models with low priority: the others are served first.

    In ascending order of RRC, the largest k with sum over j <= k of max(RRC_j, 0) <= alpha · sum
    over all of max(RRC_i, 0) have high priority. Compliant models add nothing to either sum.

    Args:
        required: RRC by model.
        alpha: The share, from 0 to 1.
    """
    if alpha >= 1.0:
        return frozenset()
    late = sorted([(needed, name) for name, needed in required.items() if needed > 0])
    limit = alpha * sum(needed for needed, _ in late)
    total = 0.0
    for number, (needed, _) in enumerate(late):
        total += needed
        if total > limit:
            return frozenset(name for _, name in late[number:])
    return frozenset()


def next_alpha(alpha: float, last_ratio: float, ratio: float) -> float:
    """Return the next alpha (Algorithm 2).

    Doubled up to 1 if the compliant ratio rose by more than the threshold, halved down to the floor
    if it fell by more.
    """
    if ratio - last_ratio > THRESHOLD:
        return min(alpha * SCALE, 1.0)
    if ratio - last_ratio < -THRESHOLD:
        return max(alpha / SCALE, FLOOR)
    return alpha
