"""Queues on shared links: from loaders' reports, and from the starts decided since."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.contracts.loader import LinkStatus, LoaderStatus

DEFAULT_BYTES_PER_SECOND = 1e9
PEER_LINK = "p2p"
"""Kind of the links between two devices of a node."""
NEGLIGIBLE_S = 0.05
"""A shorter queue does not distinguish nodes."""


def link_of(tier: str, links: Iterable[LinkStatus]) -> LinkStatus | None:
    """Return the node's link for a tier; of several the one with the longest queue."""
    of_tier = [link for link in links if link.link.partition(":")[0] == tier]
    return max(of_tier, key=lambda link: (link.finish_ms or 0.0, link.link), default=None)


def find_slowest(tier: str, device_id: str, status: LoaderStatus | None) -> float | None:
    """Return the least bandwidth from a tier to a device, as the loader measured it; None: unknown.

    Bytes from remote sources and from memory pass the device's bus too.
    """
    if status is None:
        return None
    known = [status.bytes_per_second] if tier != "dram" else []
    source = link_of(tier, status.links)
    if source is not None and source.bytes_per_second:
        known = [source.bytes_per_second]
    bus = find_bus(device_id, status)
    return min([b for b in (*known, bus) if b], default=None)


def find_bus(device_id: str, status: LoaderStatus) -> float | None:
    """Return the bandwidth of a device's own link; None: unknown, or it computes in host memory."""
    return next((link.bytes_per_second for link in status.links if link.link == f"bus:{device_id}"), None)


def peer_rate(status: LoaderStatus | None, peer: str, device_id: str) -> float:
    """Return the bandwidth of copies from one device of a node to another."""
    name = f"{PEER_LINK}:{peer}>{device_id}"
    known = (link.bytes_per_second for link in status.links if link.link == name) if status is not None else ()
    return next((rate for rate in known if rate), DEFAULT_BYTES_PER_SECOND)


def find_remote_bandwidth(status: LoaderStatus) -> float | None:
    """Return the measured bandwidth of the link to remote sources; None: unknown."""
    link = link_of("remote", status.links) if status.links else None
    return link.bytes_per_second if link is not None else None


def busy_until(reported_at: float, status: LoaderStatus | None, decided: Sequence[tuple[float, int]]) -> float:
    """Return when the queue of a node's links will be empty, on the clock of `reported_at`; 0: it
    is.

    Args:
        reported_at: Time at which the loader last reported.
        status: Its report.
        decided: Loads that the report may not include, each as (time of the decision, bytes).
    """
    until = 0.0
    speed = DEFAULT_BYTES_PER_SECOND
    if status is not None:
        shared = [link for link in status.links if not link.link.startswith(PEER_LINK)]
        queue_s = max([link.finish_ms or 0.0 for link in shared], default=0.0) / 1e3
        if queue_s > NEGLIGIBLE_S:
            until = reported_at + queue_s
        speed = status.bytes_per_second or speed
    for when, nbytes in sorted(decided):
        if status is None or when > reported_at:
            until = max(until, when) + nbytes / speed
    return until
