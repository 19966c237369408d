"""The memory booking of one device."""

from __future__ import annotations

from typing import NamedTuple


class Booking(NamedTuple):
    """Bytes of one device.

    `held_bytes - leaving_bytes + claimed_bytes` never exceeds `budget_bytes`. `held_bytes` may, by
    starts that wait on their node for memory of stopping instances.
    """

    key: str
    """node/device"""
    node: str
    device_id: str
    budget_bytes: int
    held_bytes: int
    claimed_bytes: int
    leaving_bytes: int
    free_bytes: int
    """Free now and not promised."""
    free_soon_bytes: int
    """Free and not promised once the stopping instances are gone."""
    idle_bytes: int
    """Held by ready, unpinned, idle instances that have not been asked to stop."""
    evictable_bytes: int
    """Held by ready, unpinned instances that have not been asked to stop, idle or serving."""
    idle_since: float
    """Time since which the longest-idle of them is idle; infinity without one."""
    closed_reason: str
    """The reason why nothing may be placed here; empty if something may."""
    is_reachable: bool
    """The node is alive and not stopping."""
    bytes_per_second: float | None
    """The loader's measured bandwidth, rounded to two digits so that devices group into classes."""
    remote_bytes_per_second: float | None = None
    """Bandwidth of the node's link to remote sources; None: unknown."""
    drained_bytes: int = 0
    """The part of `leaving_bytes` whose instances have drained."""
    departing_bytes: int = 0
    """The part of `leaving_bytes` whose instances have drained, or are idle and asked to stop."""
    is_separate: bool = False
    """True if the loader reports a separate device, whose instances share weights."""
    promised_bytes: int = 0
    """The part of `claimed_bytes` that full workers of groups are promised."""
    executor_bytes: int = 0
    """The part of `held_bytes` for the device's executor."""


def device_key(node: str, device_id: str) -> str:
    return f"{node}/{device_id}"
