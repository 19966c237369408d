"""Which way an engine is suspended by: the one that brings it back soonest, of those that free enough."""

from __future__ import annotations

from collections.abc import Iterable

from services.nodeagent.domain.state import Outlook

ENOUGH = 2.0
"""A way that leaves over this many times what the best one leaves in use does not free enough to be compared by time."""


def choose(outlooks: Iterable[Outlook]) -> Outlook:
    """None possible: one that says why, for each way."""
    found = list(outlooks)
    possible = [o for o in found if o.way is not None]
    if not possible:
        reasons = dict.fromkeys(o.reason for o in found if o.reason)
        return Outlook(reason="; ".join(reasons) or "suspending is switched off (THAW_SUSPEND)")
    least = min(o.left_bytes for o in possible)
    good = [o for o in possible if o.left_bytes <= ENOUGH * least or o.left_bytes == least]
    return min(good, key=lambda o: (o.resume_s, o.left_bytes))
