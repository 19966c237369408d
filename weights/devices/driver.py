"""Define the port for the parts of CUDA that Thaw uses.

`cuda_runtime.CudaRuntime` calls the real driver; tests use a driver that copies in host memory.
Every call works on the device last given to `use` in the calling thread (CUDA's own rule).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

Stream = NewType("Stream", object)
Event = NewType("Event", object)
IPC_HANDLE_BYTES = 64
"""CUDA_IPC_HANDLE_SIZE."""


@dataclass(frozen=True)
class DeviceFacts:
    """Properties of a device.

    Attributes:
        bus_id: Names the device in every process, whatever CUDA_VISIBLE_DEVICES says there.
    """

    index: int
    bus_id: str
    total_bytes: int
    driver_version: int


class CudaDriver(Protocol):
    """The CUDA calls that Thaw uses.

    Raises:
        DeviceFailed: Any call failed; the message is CUDA's.
        InsufficientMemory: `allocate` and `register` found no memory.
    """

    def count(self) -> int: ...

    def facts(self, index: int) -> DeviceFacts: ...

    def use(self, index: int) -> None:
        """Make the device current in this thread."""
        ...

    def free_bytes(self) -> int: ...

    def allocate(self, nbytes: int) -> int:
        """The address of `nbytes` of device memory."""
        ...

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> bytes:
        """A handle of IPC_HANDLE_BYTES that other processes open the allocation with."""
        ...

    def open(self, handle: bytes) -> int:
        """The address here of another process's allocation."""
        ...

    def close(self, address: int) -> None:
        """Give back what `open` gave."""
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory, for all devices."""
        ...

    def unregister(self, address: int) -> None: ...

    def stream(self, *, urgent: bool) -> Stream: ...

    def destroy_stream(self, stream: Stream) -> None: ...

    def copy(self, to_device: int, from_host: int, nbytes: int, stream: Stream) -> None:
        """Queue a copy; asynchronous if the host memory is page-locked."""
        ...

    def can_access_peer(self, index: int, peer: int) -> bool:
        """True if the device can read the memory of the device `peer` without the host."""
        ...

    def copy_from_peer(self, to_device: int, index: int, from_device: int, peer: int, nbytes: int, stream: Stream) -> None:
        """Queue a copy from the device `peer` to the device `index`, whose stream it is.

        The driver copies through host memory where the device may not read the other's memory.
        """
        ...

    def copy_back(self, to_host: int, from_device: int, nbytes: int) -> None:
        """Copy and wait: for checks."""
        ...

    def record(self, stream: Stream) -> Event:
        """An event that happens when all that was queued on `stream` so far is done."""
        ...

    def wait(self, event: Event) -> None:
        """Block (without spinning) until it has happened, and destroy it.

        Raises what the copies before it failed with.
        """
        ...
