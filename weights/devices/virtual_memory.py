"""Define the port for CUDA's virtual memory management (ADR 0060).

Physical allocations, addresses without memory and mappings are separate there. An allocation lives
until its last handle, descriptor and mapping are gone, in all processes.
`cuda_virtual_memory.CudaVirtualMemory` calls the real driver. Tests use allocations in host memory
(tests/support/fake_virtual_memory.py).
"""

from __future__ import annotations

from typing import NewType, Protocol

Allocation = NewType("Allocation", int)
"""A handle of a physical allocation (CUmemGenericAllocationHandle), valid in this process."""


class VirtualMemory(Protocol):
    """The calls of CUDA's virtual memory management that Thaw uses.

    The device's context must be current in the calling thread (`CudaDriver.use`). All sizes and
    addresses are multiples of `granularity`.

    Raises:
        DeviceFailed: Any call failed; the message is CUDA's.
        InsufficientMemory: `create` found no memory, or `reserve` no addresses.
    """

    def is_supported(self, device: int) -> bool:
        """True if the device has exportable allocations."""
        ...

    def granularity(self, device: int) -> int:
        """Return the bytes that sizes and addresses on the device are multiples of."""
        ...

    def create(self, device: int, nbytes: int) -> Allocation:
        """Allocate physical memory that can be exported. It has no address yet."""
        ...

    def release(self, allocation: Allocation) -> None:
        """Give back a handle of `create` or `import_descriptor`. Mappings keep the memory."""
        ...

    def export_descriptor(self, allocation: Allocation) -> int:
        """Return a new descriptor of the allocation, for another process. The caller closes it."""
        ...

    def import_descriptor(self, descriptor: int) -> Allocation:
        """Return a handle of another process's allocation. The descriptor may be closed then."""
        ...

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses without memory, and return the first."""
        ...

    def free_reservation(self, address: int, nbytes: int) -> None:
        """Give back a whole reservation, in which nothing is mapped any more."""
        ...

    def map(self, address: int, nbytes: int, allocation: Allocation) -> None:
        """Map a whole allocation of `nbytes` at reserved addresses. No access is granted yet."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo one `map`. The addresses stay reserved."""
        ...

    def set_access(self, address: int, nbytes: int, device: int, *, writable: bool) -> None:
        """Let the device access a range in which everything is mapped."""
        ...
