"""Torpor §5.2 and Appendix A.3: SLO-aware request queueing, and the configuration of alpha.

The paper states the scale factor 2 and the threshold 0.04 (Algorithm 2). It states neither the
period nor the first alpha, and from an alpha near 0 doubling recovers slowly: the first alpha, the
period and the floor are Thaw's choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from services.scheduler.domain.policies.port import Ask, Usage

SCALE = 2.0
THRESHOLD = 0.04
FIRST_ALPHA = 0.5
"""Thaw's choice: the middle."""
FLOOR = 1 / 64
"""Thaw's choice: six doublings lead back to 1."""
PERIOD_S = 10.0
"""Thaw's choice: a function with 6 requests a minute appears once in a period."""


def required_requests(usage: Usage) -> float:
    """Return RRC = (p·n - m) / (1 - p): requests to be met in a row until the function complies."""
    return (usage.percentile * usage.total - usage.met) / (1.0 - usage.percentile)


def complies(usage: Usage) -> bool:
    return required_requests(usage) <= 0


def compliant_ratio(book: Iterable[Usage]) -> float:
    """Return the share of functions that comply; 1 of none."""
    found = [complies(u) for u in book]
    return sum(found) / len(found) if found else 1.0


def high_priority(book: Mapping[str, Usage], alpha: float) -> frozenset[str]:
    """Return the functions with high priority.

    In ascending order of RRC, the largest k with sum over j <= k of max(RRC_j, 0) <= alpha · sum
    over all of max(RRC_i, 0). Compliant functions add nothing to either sum.
    """
    if alpha >= 1.0:
        return frozenset(book)
    rrc = {name: required_requests(u) for name, u in book.items()}
    late = sorted([(needed, name) for name, needed in rrc.items() if needed > 0])
    limit = alpha * sum(needed for needed, _ in late)
    total = 0.0
    for number, (needed, _) in enumerate(late):
        total += needed
        if total > limit:
            return frozenset(rrc).difference([name for _, name in late[number:]])
    return frozenset(rrc)


def order(asks: Sequence[Ask], book: Mapping[str, Usage], alpha: float) -> list[Ask]:
    """Order asks by two queues.

    High priority: larger RRC first, so that a nearly compliant function goes before compliant ones.
    Low priority, after these: smaller RRC first. At equal RRC the longest wait first.
    """
    high = high_priority(book, alpha)

    def place(ask: Ask) -> tuple[bool, float, float, str, str]:
        usage = book.get(ask.model)
        needed = required_requests(usage) if usage is not None else 0.0
        low = usage is not None and ask.model not in high
        return (low, needed if low else -needed, -ask.waited_s, ask.model, ask.request_id)

    return sorted(asks, key=place)


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
