"""Torpor §5.2 and Appendix A.3: SLO-aware queueing of requests that need a device.

The formulas are in `shared.compliance`: executors order their steps by them, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from services.scheduler.domain.policies.port import Ask, Usage
from shared import compliance
from shared.compliance import FIRST_ALPHA, FLOOR, PERIOD_S, next_alpha

__all__ = [
    "FIRST_ALPHA",
    "FLOOR",
    "PERIOD_S",
    "compliant_ratio",
    "complies",
    "high_priority",
    "next_alpha",
    "order",
    "required_requests",
]


def required_requests(usage: Usage) -> float:
    """Return RRC: requests to be met in a row until the function complies."""
    return compliance.required_requests(usage.total, usage.met, usage.percentile)


def complies(usage: Usage) -> bool:
    return required_requests(usage) <= 0


def compliant_ratio(book: Iterable[Usage]) -> float:
    """Return the share of functions that comply; 1 of none."""
    found = [complies(u) for u in book]
    return sum(found) / len(found) if found else 1.0


def high_priority(book: Mapping[str, Usage], alpha: float) -> frozenset[str]:
    """Return the functions with high priority."""
    required = {name: required_requests(u) for name, u in book.items()}
    return frozenset(book) - compliance.low_priority(required, alpha)


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
