"""The port that every kind of device implements (ADR 0027): memory on it, filled from host memory as bytes arrive, and handed to engines.

    device.pin(address, nbytes)                 a chunk of the pool was populated (before anything is copied from it)
    arena = device.allocate(place, priority)    room for one segment
    arena.fill(offset, address, nbytes)         these bytes are in host memory now; any order, each byte once; returns at once
    arena.watermark                             every byte below it is on the device
    arena.wait(until)                           … and waiting for that
    arena.handle()                              what an engine opens; valid from `allocate` on
    arena.release()                             stop copying, give the memory back
    device.unpin(address)                       before the chunk's memory is punched out

The host memory of a range that was filled must stay until the watermark has passed it, or `release` has returned.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from shared.contracts.segment import ArenaHandle, Extent


class Priority(IntEnum):
    """Who waits for a copy. A smaller one goes first, from the next group of copies on."""

    REQUEST = 0
    BACKGROUND = 1


@dataclass(frozen=True)
class Place:
    """The segment that an arena is for: its length in bytes, and where in which shared-memory file it lies in host memory."""

    weights_id: str
    nbytes: int
    segment: str
    extents: tuple[Extent, ...] = ()


class Arena(Protocol):
    """Memory for one segment on one device. Calls come from any thread."""

    @property
    def nbytes(self) -> int: ...

    @property
    def watermark(self) -> int:
        """Every byte of the segment below it is on the device."""
        ...

    def fill(self, offset: int, address: int, nbytes: int) -> None:
        """Bytes [offset, offset + nbytes) of the segment lie at `address` in host memory: bring them over.

        Raises `ValueError` for a range outside the segment or given before, and what the device failed with, if it has.
        """
        ...

    def wait(self, until: int, cancelled: threading.Event | None = None) -> bool:
        """Block until the watermark is at least `until`; False if `cancelled` was set or the arena released first.

        Raises what the device failed with.
        """
        ...

    def handle(self) -> ArenaHandle:
        """What an engine opens the memory with. Bytes above the watermark are undefined."""
        ...

    def raise_priority(self, priority: Priority) -> None:
        """Copies not begun yet go with `priority` from now on."""
        ...

    def release(self) -> int:
        """Call off what is queued, wait for what is being copied, give the memory back; its bytes. Again: 0.

        An engine that still maps it must be gone before (the loader's holders see to that): to free what another process has opened
        is undefined on CUDA.
        """
        ...


class Device(Protocol):
    @property
    def device_id(self) -> str:
        """As `cpu:0`, `cuda:1`."""
        ...

    @property
    def link(self) -> str | None:
        """The link that copies to it take, as `LinkStatus.link`; None where nothing is copied."""
        ...

    @property
    def queued_bytes(self) -> int:
        """Filled and not yet on the device, over all arenas."""
        ...

    @property
    def bytes_per_second(self) -> float | None:
        """Of the link, learned from the latest copies; None before the first."""
        ...

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock host memory that copies come from. Again: nothing. Whole pages, populated."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin` of this address; unknown ones are fine. Nothing may be copying from it."""
        ...

    def allocate(self, place: Place, priority: Priority = Priority.REQUEST) -> Arena:
        """Raises `InsufficientMemory` if there is no room on the device."""
        ...

    def close(self) -> None:
        """Release all arenas, unpin all memory."""
        ...
