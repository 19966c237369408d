"""Queues on the links that loads share: what loaders report, and the starts decided since."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.contracts.loader import LinkStatus, LoaderStatus

DEFAULT_BYTES_PER_SECOND = 1e9
NEGLIGIBLE_S = 0.05
"""A queue shorter than this tells no node from another."""


def link_of(tier: str, links: Iterable[LinkStatus]) -> LinkStatus | None:
    """The link of a node that bytes of that tier come over; of several the one with the longest queue."""
    of_tier = [link for link in links if link.link.partition(":")[0] == tier]
    return max(of_tier, key=lambda link: (link.finish_ms or 0.0, link.link), default=None)


def slowest(tier: str, device_id: str, status: LoaderStatus | None) -> float | None:
    """b: the least bandwidth on the way from a tier to a device of the node, as the loader has measured it; None: it has not.

    What comes from afar passes the device's bus too, and so does what lies in memory.
    """
    if status is None:
        return None
    known = [status.bytes_per_second] if tier != "dram" else []
    source = link_of(tier, status.links)
    if source is not None and source.bytes_per_second:
        known = [source.bytes_per_second]
    bus = next((link.bytes_per_second for link in status.links if link.link == f"bus:{device_id}"), None)
    return min([b for b in (*known, bus) if b], default=None)


def afar(status: LoaderStatus) -> float | None:
    """Bandwidth of a node's link to remote sources, as its loader has measured it; None: it has not."""
    link = link_of("remote", status.links) if status.links else None
    return link.bytes_per_second if link is not None else None


def busy_until(heard_at: float, status: LoaderStatus | None, decided: Sequence[tuple[float, int]]) -> float:
    """When all that is queued at a node will have come, on the clock of `heard_at`; 0: nothing is.

    `decided`: loads that its loader may not have known of yet when it reported, each as (when decided, bytes).
    """
    until = 0.0
    speed = DEFAULT_BYTES_PER_SECOND
    if status is not None:
        queue_s = max([link.finish_ms or 0.0 for link in status.links], default=0.0) / 1e3
        if queue_s > NEGLIGIBLE_S:
            until = heard_at + queue_s
        speed = status.bytes_per_second or speed
    for when, nbytes in sorted(decided):
        if status is None or when > heard_at:
            until = max(until, when) + nbytes / speed
    return until
