"""The port for CUDA's virtual memory management (ADR 0060).

CUDA separates physical allocations, reserved addresses and mappings. An allocation exists until its
last handle, descriptor and mapping are released, in all processes.
`cuda_virtual_memory.CudaVirtualMemory` calls the real driver. Tests use allocations in host memory
(tests/support/fake_virtual_memory.py).
"""

from __future__ import annotations

from typing import NewType, Protocol

Allocation = NewType("Allocation", int)
"""A handle of a physical allocation (CUmemGenericAllocationHandle), valid in this process."""


class VirtualMemory(Protocol):
    """Calls of CUDA's virtual memory management.

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
        """Return the number of bytes of which sizes and addresses on the device are multiples."""
        ...

    def create(self, device: int, nbytes: int, *, exportable: bool = True) -> Allocation:
        """Allocate physical memory, which has no address yet.

        Args:
            exportable: Other processes can import it.
        """
        ...

    def release(self, allocation: Allocation) -> None:
        """Release a handle of `create` or `import_descriptor`. Mappings keep the memory."""
        ...

    def export_descriptor(self, allocation: Allocation) -> int:
        """Return a new descriptor of the allocation, for another process. The caller closes it."""
        ...

    def import_descriptor(self, descriptor: int) -> Allocation:
        """Return a handle of another process's allocation. Afterwards the caller may close the
        descriptor.
        """
        ...

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses without memory, and return the first."""
        ...

    def free_reservation(self, address: int, nbytes: int) -> None:
        """Free a whole reservation. No allocation may be mapped in it."""
        ...

    def map(self, address: int, nbytes: int, allocation: Allocation) -> None:
        """Map a whole allocation of `nbytes` at reserved addresses, without access."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo one `map`. The addresses stay reserved."""
        ...

    def set_access(self, address: int, nbytes: int, device: int, *, writable: bool) -> None:
        """Let a device access a range that is completely mapped; the rights of others stay.

        Another device than the allocation's needs peer access (`CudaDriver.can_access_peer`).
        """
        ...
