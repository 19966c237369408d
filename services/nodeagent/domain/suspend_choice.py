"""Chooses how to suspend: the fastest resume that frees enough memory."""

from __future__ import annotations

from collections.abc import Iterable

from services.nodeagent.domain.state import Outlook

ENOUGH = 2.0
"""A method that leaves more than this multiple of the best one's remaining memory in use is not
considered.
"""


def choose(outlooks: Iterable[Outlook]) -> Outlook:
    """The best outlook.

    If no method is possible, an outlook with the reasons of all methods.
    """
    found = list(outlooks)
    possible = [o for o in found if o.way is not None]
    if not possible:
        reasons = dict.fromkeys(o.reason for o in found if o.reason)
        return Outlook(reason="; ".join(reasons) or "suspending is disabled (THAW_SUSPEND)")
    least = min(o.left_bytes for o in possible)
    good = [o for o in possible if o.left_bytes <= ENOUGH * least or o.left_bytes == least]
    return min(good, key=lambda o: (o.resume_s, o.left_bytes))
