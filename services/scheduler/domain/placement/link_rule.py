"""HydraServe's contention-aware admission: no fetch that makes others miss their objectives.

The ledger (lifecycle/fetches.py) has the fetches of each node. A node is refused to a start whose
fetch would delay another one beyond its deadline. The start takes another node, a smaller part of
the weights (a group of more stages), or waits until the link is less busy. Pure.
"""

from __future__ import annotations

import math

from services.scheduler.domain.cost.contention import PendingFetch, late_fetches, pending_now
from services.scheduler.domain.cost.links import find_remote_bandwidth
from services.scheduler.domain.estimates.start_times import Forecast
from services.scheduler.domain.placement.constraints import Excludes
from services.scheduler.domain.state.booking import Booking
from services.scheduler.domain.state.transaction import Transaction

_WORDS = {1: "one fetch", 2: "two fetches", 3: "three fetches"}


def link_rule(tx: Transaction, forecast: Forecast) -> Excludes | None:
    """Return the check of links for a start; None: no fetch is under way.

    Args:
        tx: The decision's transaction.
        forecast: The start; its card has the bytes that one node fetches.
    """
    if not tx.state.fetches or not forecast.is_remote or forecast.card.spec.loads_itself:
        return None
    nbytes = forecast.card.info.weights_bytes
    found: dict[str, str] = {}
    """By node."""

    def excludes(b: Booking) -> str:
        why = found.get(b.node)
        if why is None:
            why = found[b.node] = _explain_contention(tx, b.node, nbytes) if forecast.fetches(b.node) else ""
        return why

    return excludes


def _explain_contention(tx: Transaction, node: str, nbytes: int) -> str:
    """Return whose objectives a fetch on the node would make them miss; empty: none."""
    fetches, loader = tx.state.fetches_of(node), tx.state.loaders.get(node)
    bandwidth = find_remote_bandwidth(loader.status) if fetches and loader is not None else None
    if not bandwidth:
        return ""
    pending = [
        PendingFetch(
            pending_now(f.pending_bytes, bandwidth, len(fetches), tx.now - f.at),
            math.inf if f.deadline is None else f.deadline - tx.now,
        )
        for f in fetches
    ]
    late = late_fetches(pending, nbytes, bandwidth)
    if not late:
        return ""
    count = _WORDS.get(len(late), f"{len(late)} fetches")
    whose = "its objective" if len(late) == 1 else "their objective"
    models = ", ".join(sorted({fetches[n].model for n in late}))
    return f"{node}'s link: {count} would miss {whose} ({models})"
