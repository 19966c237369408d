"""The memory of a process by the instances whose steps made it grow.

The kernel counts memory by process, not by instance. One instance computes at a time, so that the
growth during its steps is its own, but memory may be freed later, during another instance's steps.
An instance is therefore blamed only while the whole process uses more than all of its instances
have reserved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class MemoryShares:
    """The memory of a process.

    Args:
        base_bytes: Memory of no instance.
        total_bytes: The last measurement.
        limits: The reservation of each instance besides its weights, in bytes.
        grown: Growth during each instance's steps, in bytes; negative if memory was freed.
        workspace_bytes: Memory that the instances use in turns, which the executor reserves once.
    """

    base_bytes: int
    total_bytes: int
    limits: Mapping[str, int] = field(default_factory=dict)
    grown: Mapping[str, int] = field(default_factory=dict)
    workspace_bytes: int = 0

    @property
    def excess_bytes(self) -> int:
        """Memory beyond the base, the workspace and the reservations of all instances."""
        return self.total_bytes - self.base_bytes - self.workspace_bytes - sum(self.limits.values())


def join(shares: MemoryShares, name: str, limit_bytes: int, workspace_bytes: int = 0) -> MemoryShares:
    """Return the shares with one more instance."""
    return replace(
        shares,
        limits={**shares.limits, name: limit_bytes},
        grown={**shares.grown, name: 0},
        workspace_bytes=max(shares.workspace_bytes, workspace_bytes),
    )


def charge(shares: MemoryShares, name: str | None, total_bytes: int) -> MemoryShares:
    """Return the shares after a measurement.

    Args:
        shares: The shares before.
        name: The instance that computed since the last measurement; None: none.
        total_bytes: The memory of the process.
    """
    grown = shares.grown
    if name is not None and name in grown:
        grown = {**grown, name: grown[name] + total_bytes - shares.total_bytes}
    return replace(shares, total_bytes=total_bytes, grown=grown)


def find_excess(shares: MemoryShares) -> str | None:
    """Return the instance that has grown most beyond its reservation; None: no excess."""
    if not shares.grown or shares.excess_bytes <= 0:
        return None
    return max(shares.grown, key=lambda name: (shares.grown[name] - shares.limits[name], name))


def leave(shares: MemoryShares, name: str, total_bytes: int) -> MemoryShares:
    """Return the shares without an instance that was detached.

    Memory that the process has not given back, and that no remaining instance took, is added to the
    base, so that no other instance is blamed for it.
    """
    limits = {other: limit for other, limit in shares.limits.items() if other != name}
    grown = {other: nbytes for other, nbytes in shares.grown.items() if other != name}
    base_bytes = max(shares.base_bytes, total_bytes - sum(max(0, nbytes) for nbytes in grown.values()))
    return replace(shares, base_bytes=base_bytes, total_bytes=total_bytes, limits=limits, grown=grown)
