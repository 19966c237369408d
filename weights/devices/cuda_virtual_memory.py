"""Call CUDA's virtual memory management by cuda-bindings (the extra `cuda`).

Names and signatures are checked against cuda-bindings 13.5. None of it has run on a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shared.errors import DeviceFailed, DeviceMissing, InsufficientMemory
from weights.devices.virtual_memory import Allocation


class CudaVirtualMemory:
    """`VirtualMemory` through cuda-bindings. Thread-safe, as CUDA's driver is.

    Devices have the same numbers in CUDA's driver and in its runtime.

    Args:
        driver: The module `cuda.bindings.driver`.
    """

    def __init__(self, driver: Any) -> None:
        self._cu = driver
        self._descriptor = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def is_supported(self, device: int) -> bool:
        attributes = self._cu.CUdevice_attribute
        wanted = (
            attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        )
        return all(self._call(self._cu.cuDeviceGetAttribute, attribute, device) for attribute in wanted)

    def granularity(self, device: int) -> int:
        minimum = self._cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call(self._cu.cuMemGetAllocationGranularity, self._properties(device), minimum))

    def create(self, device: int, nbytes: int, *, exportable: bool = True) -> Allocation:
        return Allocation(int(self._call(self._cu.cuMemCreate, nbytes, self._properties(device, exportable=exportable), 0)))

    def release(self, allocation: Allocation) -> None:
        self._call(self._cu.cuMemRelease, allocation)

    def export_descriptor(self, allocation: Allocation) -> int:
        return int(self._call(self._cu.cuMemExportToShareableHandle, allocation, self._descriptor, 0))

    def import_descriptor(self, descriptor: int) -> Allocation:
        # CUDA takes the descriptor's number in place of a pointer.
        return Allocation(int(self._call(self._cu.cuMemImportFromShareableHandle, descriptor, self._descriptor)))

    def reserve(self, nbytes: int) -> int:
        return int(self._call(self._cu.cuMemAddressReserve, nbytes, 0, 0, 0))

    def free_reservation(self, address: int, nbytes: int) -> None:
        self._call(self._cu.cuMemAddressFree, address, nbytes)

    def map(self, address: int, nbytes: int, allocation: Allocation) -> None:
        self._call(self._cu.cuMemMap, address, nbytes, 0, allocation, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call(self._cu.cuMemUnmap, address, nbytes)

    def set_access(self, address: int, nbytes: int, device: int, *, writable: bool) -> None:
        flags = self._cu.CUmemAccess_flags
        access = self._cu.CUmemAccessDesc()
        access.location = self._location(device)
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self._call(self._cu.cuMemSetAccess, address, nbytes, [access], 1)

    def _properties(self, device: int, *, exportable: bool = True) -> Any:
        """Return the properties of memory on the device.

        Args:
            exportable: Other processes can import it by descriptor.
        """
        found = self._cu.CUmemAllocationProp()
        found.type = self._cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        found.location = self._location(device)
        if exportable:
            found.requestedHandleTypes = self._descriptor
        return found

    def _location(self, device: int) -> Any:
        found = self._cu.CUmemLocation()
        found.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        found.id = device
        return found

    def _call(self, function: Any, *arguments: Any) -> Any:
        """Call a function of the driver, and return its result, or None.

        cuda-bindings returns (status, *results).
        """
        status, *results = function(*arguments)
        if status == self._cu.CUresult.CUDA_SUCCESS:
            return results[0] if results else None
        _, words = self._cu.cuGetErrorString(status)
        message = f"{function.__name__}: {words.decode() if words else 'unknown error'} ({status.name})"
        if status == self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise InsufficientMemory(f"{message}; put other models to sleep, or give them less memory", should_retry=True)
        raise DeviceFailed(message)


def load_virtual_memory() -> CudaVirtualMemory:
    """Load CUDA's driver library.

    Raises:
        DeviceMissing: The package cuda-bindings is missing; the message has the remedy.
    """
    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError as e:
        raise DeviceMissing("CUDA needs the package cuda-bindings: pip install 'thaw-mesh[cuda]'") from e
    return CudaVirtualMemory(driver)
