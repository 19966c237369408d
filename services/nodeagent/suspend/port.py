"""The interface of a suspend method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from services.nodeagent.domain.state import Outlook
from shared.contracts.node import SuspendWay

UNPROVABLE = "memory of its processes cannot be read here (NVML has other pids for them), so the result could not be verified"
"""Reason for an engine on a GPU that appears to use none of the GPU's memory."""


@dataclass(frozen=True)
class Target:
    """An engine as a suspend method sees it.

    Args:
        pids: All of its processes, without the host.
        hosted: True if it has a host, which keeps running.
        environment: Variables set by the operator.
        moved_from: Devices of its snapshot, to be restored onto `device_ids`; none: onto the same.
        in_container: True if its processes see only the devices of their container.
    """

    instance_id: str
    engine: str
    device_ids: tuple[str, ...]
    pids: tuple[int, ...]
    hosted: bool = False
    sleep_levels: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    moved_from: tuple[str, ...] = ()
    in_container: bool = False

    @property
    def on_cuda(self) -> bool:
        return any(d.startswith("cuda:") for d in self.device_ids)


@dataclass(frozen=True)
class SuspendResult:
    """Measured result of a suspension.

    Device memory before and after, and host memory and swap of the snapshot.
    """

    used_bytes: int
    left_bytes: int
    snapshot_bytes: int

    @property
    def freed_bytes(self) -> int:
        return max(0, self.used_bytes - self.left_bytes)


class SuspendMethod(Protocol):
    """A method to suspend engines.

    The engine is drained and paused from before `suspend` until it is woken after `resume`.
    """

    @property
    def name(self) -> SuspendWay: ...

    def explain_unavailable(self) -> str:
        """The reason why this node cannot use the method; empty if it can. Blocking."""
        ...

    def outlook(self, target: Target) -> Outlook:
        """Return the expected effect of a suspension, or why it is impossible. Blocking."""
        ...

    async def suspend(self, target: Target) -> SuspendResult:
        """Suspend the engine.

        Raises `CannotSuspend`, with everything undone, if it fails or frees too little.
        """
        ...

    async def resume(self, target: Target) -> None:
        """Undo `suspend`, even a partial one.

        No effect if there is nothing to undo. Raises `RestoreFailed`.
        """
        ...

    def learn(self, snapshot_bytes: int, took_s: float) -> None:
        """Record the duration of a resume up to the engine's first answer."""
        ...

    def forget(self, instance_id: str) -> None:
        """Drop the state of an ended instance."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Keep the state of instance `old` for instance `new`, which now has its processes."""
        ...


@runtime_checkable
class Spilling(Protocol):
    """A method whose snapshots are in host memory and can be moved to swap."""

    def explain_unavailable(self) -> str: ...

    def explain_spill_unavailable(self) -> str:
        """The reason why this node cannot; empty if it can. Blocking."""
        ...

    async def spill(self, target: Target) -> int:
        """Move a snapshot to swap and return the freed bytes.

        Raises `CannotSuspend`, with the snapshot unchanged.
        """
        ...
