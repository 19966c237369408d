"""A contiguous range of a GPU's addresses, into which allocations are mapped (ADR 0060)."""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import DeviceFailed
from weights.devices.virtual_memory import Allocation, VirtualMemory


class MappedRange:
    """Reserved addresses, and what is mapped there. Not thread-safe.

    The device's context must be current in the calling thread.

    Attributes:
        address: The first address.
        nbytes: Length of the range.
    """

    def __init__(self, memory: VirtualMemory, device: int, nbytes: int) -> None:
        """Reserve the addresses.

        Raises:
            DeviceFailed: The size is no multiple of the device's granularity.
            InsufficientMemory: There are no such addresses.
        """
        self._memory, self._device, self.nbytes = memory, device, nbytes
        self.address = memory.reserve(nbytes)
        self._mapped: dict[int, int] = {}

    def map(self, start: int, nbytes: int, allocation: Allocation, *, writable: bool) -> None:
        """Map a whole allocation from byte `start` on. The mapping keeps its memory.

        Raises:
            DeviceFailed: Memory is mapped there already, or the driver failed.
        """
        if start < 0 or start + nbytes > self.nbytes:
            raise DeviceFailed(f"{nbytes} bytes at {start} are outside a range of {self.nbytes} bytes")
        at = self.address + start
        self._memory.map(at, nbytes, allocation)
        try:
            self._memory.set_access(at, nbytes, self._device, writable=writable)
        except BaseException:
            self._memory.unmap(at, nbytes)
            raise
        self._mapped[at] = nbytes

    def map_writable(self, start: int, nbytes: int, allocations: Sequence[Allocation]) -> None:
        """Map allocations of `nbytes` each, one after the other from byte `start` on.

        Raises:
            DeviceFailed: The driver failed. None of them is mapped then.
        """
        end = start + nbytes * len(allocations)
        if start < 0 or end > self.nbytes:
            raise DeviceFailed(f"Bytes {start} to {end} are outside a range of {self.nbytes} bytes")
        done: list[int] = []
        try:
            for at, allocation in zip(range(self.address + start, self.address + end, nbytes), allocations, strict=True):
                self._memory.map(at, nbytes, allocation)
                done.append(at)
            if done:
                self._memory.set_access(self.address + start, end - start, self._device, writable=True)
        except BaseException:
            for at in done:
                self._memory.unmap(at, nbytes)
            raise
        self._mapped |= dict.fromkeys(done, nbytes)

    def map_descriptor(self, start: int, nbytes: int, descriptor: int) -> None:
        """Map another process's allocation read-only. The caller closes the descriptor.

        Raises:
            DeviceFailed: The descriptor is no allocation of this size, or as `map`.
        """
        imported = self._memory.import_descriptor(descriptor)
        try:
            self.map(start, nbytes, imported, writable=False)
        finally:
            self._memory.release(imported)

    def unmap(self, start: int) -> None:
        """Undo the mapping that begins at byte `start`. No work may use it any more."""
        at = self.address + start
        self._memory.unmap(at, self._mapped.pop(at))

    def share(self, device: int) -> None:
        """Let another device read everything that is mapped.

        Raises:
            DeviceFailed: That device cannot access the memory.
        """
        for at, nbytes in self._mapped.items():
            self._memory.set_access(at, nbytes, device, writable=False)

    def close(self) -> None:
        """Unmap everything, and give the addresses back. No work may use them any more."""
        for at, nbytes in self._mapped.items():
            self._memory.unmap(at, nbytes)
        self._mapped.clear()
        if self.nbytes:
            self._memory.free_reservation(self.address, self.nbytes)
            self.nbytes = 0
