"""Define the port that every kind of device implements (ADR 0027).

A device has memory that is filled from host memory as bytes arrive, and that engines map.

    device.pin(address, nbytes)                 a chunk of the pool was populated (before any copy)
    arena = device.allocate(place, priority)    room for one segment
    arena.fill(offset, address, nbytes)         these bytes are in host memory now; any order, each
                                                byte once; returns at once
    arena.watermark                             every byte below it is on the device
    arena.wait(until)                           wait until the watermark is there
    arena.handle()                              what an engine opens; from `allocate` on, or None
                                                until every byte is there
    arena.release()                             stop copying, give the memory back
    device.unpin(address)                       before the chunk's memory is punched out

The host memory of a filled range must stay until the watermark has passed it, or `release` has
returned.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from shared.contracts.segment import ArenaHandle, Extent, SegmentTensor


class Priority(IntEnum):
    """Priority of a copy.

    A smaller one is copied first, from the next group of copies on.
    """

    REQUEST = 0
    BACKGROUND = 1


@dataclass(frozen=True)
class Contents:
    """The contents of a segment, for devices that share equal bytes between weights.

    Attributes:
        tensors: The segment's tensors.
        digests: SHA-256 of a tensor's bytes by its name, as far as the checkpoint's index says.
        model: Name of the model.
        must_match: Bytes that differ from `digests` fail the load: nothing else has checked them.
        is_pinned: The weights are not reclaimed while no instance uses them.
    """

    tensors: tuple[SegmentTensor, ...]
    digests: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    is_pinned: bool = False
    must_match: bool = False


@dataclass(frozen=True)
class Place:
    """An arena's segment: its length in bytes, and its place in host memory.

    The place is a range of a shared-memory file.
    """

    weights_id: str
    nbytes: int
    segment: str
    extents: tuple[Extent, ...] = ()
    contents: Contents | None = None


class Arena(Protocol):
    """Memory for one segment on one device. Methods may be called from any thread."""

    @property
    def nbytes(self) -> int: ...

    @property
    def watermark(self) -> int:
        """Every byte of the segment below it is on the device."""
        ...

    def fill(self, offset: int, address: int, nbytes: int) -> None:
        """Copy bytes [offset, offset + nbytes) of the segment from host memory `address`.

        Raises:
            ValueError: The range is outside the segment, or was filled before.
            DeviceFailed: The device has failed.
        """
        ...

    def wait(self, until: int, cancelled: threading.Event | None = None) -> bool:
        """Block until the watermark is at least `until`.

        Returns:
            False if `cancelled` was set or the arena released first.

        Raises:
            DeviceFailed: The device has failed.
        """
        ...

    def handle(self) -> ArenaHandle | None:
        """Return what an engine opens the memory with.

        Bytes above the watermark are undefined. None: it cannot be opened before every byte is
        there.
        """
        ...

    def raise_priority(self, priority: Priority) -> None:
        """Copy with `priority` what is not being copied yet."""
        ...

    def release(self) -> int:
        """Cancel queued copies, wait for those in progress, free the memory.

        Returns the bytes given back; 0 on a second call, and where they stay for reuse.

        An engine that maps it must have exited before (the loader's holders ensure that): freeing
        memory that another process has opened is undefined on CUDA.
        """
        ...


class Device(Protocol):
    @property
    def device_id(self) -> str:
        """The device's id, such as `cpu:0` or `cuda:1`."""
        ...

    @property
    def link(self) -> str | None:
        """Return the link of copies to the device, as `LinkStatus.link`.

        None if nothing is copied.
        """
        ...

    @property
    def group_bytes(self) -> int | None:
        """Bytes of a group of copies: the elbow of the device's curve (`curve.elbow`).

        None if nothing is copied.
        """
        ...

    @property
    def queued_bytes(self) -> int:
        """Bytes filled and not yet on the device, over all arenas."""
        ...

    @property
    def copied_bytes(self) -> int:
        """Bytes copied over the link since the device was opened."""
        ...

    @property
    def bytes_per_second(self) -> float | None:
        """Bandwidth of the link by the latest copies; None before the first."""
        ...

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock host memory that copies read: whole, populated pages.

        A second call does nothing.
        """
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin` of this address; unknown ones are fine.

        Nothing may be copying from it.
        """
        ...

    def allocate(self, place: Place, priority: Priority = Priority.REQUEST) -> Arena:
        """Allocate an arena.

        Raises `InsufficientMemory` if the device has no memory for it.
        """
        ...

    def close(self) -> None:
        """Release all arenas, unpin all memory."""
        ...
