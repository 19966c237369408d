"""What a device has, and what of it is taken."""

from __future__ import annotations

from typing import NamedTuple


class Booking(NamedTuple):
    """Bytes of one device. `held - leaving + claimed` is never let over `budget`; `held` only by starts that wait on their node for bytes of
    what is leaving."""

    key: str
    """node/device"""
    node: str
    device_id: str
    budget_bytes: int
    held_bytes: int
    claimed_bytes: int
    leaving_bytes: int
    free_bytes: int
    """Free now and promised to nobody."""
    free_soon_bytes: int
    """Free and promised to nobody once those that leave have left."""
    idle_bytes: int
    """Held by ready, unpinned instances that have nothing to do and have not been asked to leave."""
    evictable_bytes: int
    """Held by ready, unpinned instances that have not been asked to leave, idle or not."""
    idle_since: float
    """Since when the longest idle of them is idle; infinity if none is."""
    closed_reason: str
    """Why nothing may be placed here, whatever is free; empty if something may."""
    is_reachable: bool
    """The node is alive and not stopping."""
    bytes_per_second: float | None
    """What the node's loader measured, to two digits: finer differences tell nothing, and would tell every device from every other."""
    remote_bytes_per_second: float | None = None
    """… of its link to remote sources; None: nothing."""
    drained_bytes: int = 0
    """Of `leaving`, what nothing keeps there any more."""


def device_key(node: str, device_id: str) -> str:
    return f"{node}/{device_id}"
