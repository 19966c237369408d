"""A way to suspend an engine: what every one of them can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from services.nodeagent.domain.state import Outlook
from shared.contracts.node import SuspendWay

UNPROVABLE = "the bytes of its processes cannot be read here (NVML knows them by other pids): nothing could be proved"
"""Of an engine that runs on a GPU and is seen to use none of it."""


@dataclass(frozen=True)
class Target:
    """An engine as a way sees it. `pids`: all of its processes, without the host's; `hosted`: it has a host, which goes on meanwhile.
    `environment`: what the operator set for it."""

    instance_id: str
    engine: str
    device_ids: tuple[str, ...]
    pids: tuple[int, ...]
    hosted: bool = False
    sleep_levels: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def on_cuda(self) -> bool:
        return any(d.startswith("cuda:") for d in self.device_ids)


@dataclass(frozen=True)
class Taken:
    """What a suspension did, read back: bytes of the device before and after, and what its snapshot takes of host memory and swap."""

    used_bytes: int
    left_bytes: int
    snapshot_bytes: int

    @property
    def freed_bytes(self) -> int:
        return max(0, self.used_bytes - self.left_bytes)


class Way(Protocol):
    """The engine has drained before `suspend`, and refuses requests until it is woken after `resume`."""

    @property
    def name(self) -> SuspendWay: ...

    def unavailable(self) -> str:
        """Why this node cannot do it at all; empty if it can. Blocking."""
        ...

    def outlook(self, target: Target) -> Outlook:
        """What it would do to this engine, or why it cannot. Blocking."""
        ...

    async def suspend(self, target: Target) -> Taken:
        """Raises `CannotSuspend`, with everything undone, if it does not come about or frees too little."""
        ...

    async def resume(self, target: Target) -> None:
        """Undo `suspend`, also half of one; harmless if there is nothing to undo. Raises `RestoreFailed`."""
        ...

    def learn(self, snapshot_bytes: int, took_s: float) -> None:
        """A resumption was over, its engine answering again, after `took_s`."""
        ...

    def forget(self, instance_id: str) -> None:
        """The instance has ended."""
        ...


@runtime_checkable
class Spilling(Protocol):
    """A way whose snapshots lie in host memory and can go on to swap."""

    def unavailable(self) -> str: ...

    def cannot_spill(self) -> str:
        """Why not on this node; empty if they can. Blocking."""
        ...

    async def spill(self, target: Target) -> int:
        """Bytes of host memory that came free. Raises `CannotSuspend`, with the snapshot where it was."""
        ...
