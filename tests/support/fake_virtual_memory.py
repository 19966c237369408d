"""A stand-in for CUDA's virtual memory management, in host memory.

An allocation is a memfd and a mapping is one of the kernel's, at the address of which the bytes can
be read. So descriptors work between processes, and an access without a right ends the process. The
stand-in refuses calls whose result CUDA does not define.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import DeviceFailed, InsufficientMemory
from weights.devices.virtual_memory import Allocation

GRANULARITY = 2 * 1024 * 1024
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_MEMFD = "thaw-fake-cuda"
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass
class Mapping:
    """A mapping of addresses.

    Attributes:
        device: Device of the memory; None: another process's memory.
        access: "r" or "rw", by device.
    """

    nbytes: int
    inode: int
    device: int | None = None
    access: dict[int, str] = field(default_factory=dict)


class FakeVirtualMemory:
    """The memory of `devices` devices, `total_bytes` of each.

    Attributes:
        granularity_bytes: What sizes and addresses are multiples of.
        has_links: Devices can access the memory of each other.
        reservations: Reserved ranges by their first address.
        mappings: By their first address.
        handles: Descriptors by allocation.
    """

    def __init__(self, total_bytes: int = 64 * 1024 * 1024, devices: int = 1, granularity_bytes: int = GRANULARITY) -> None:
        self.granularity_bytes, self.has_links = granularity_bytes, True
        self.reservations: dict[int, int] = {}
        self.mappings: dict[int, Mapping] = {}
        self.handles: dict[Allocation, int] = {}
        self._total_bytes, self._devices = total_bytes, devices
        self._created: dict[int, tuple[int, int]] = {}
        self._private: set[Allocation] = set()
        self._in_use: list[tuple[int, int]] = []
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    def is_supported(self, device: int) -> bool:
        return 0 <= device < self._devices

    def granularity(self, device: int) -> int:
        self._check_device("cuMemGetAllocationGranularity", device)
        return self.granularity_bytes

    # -- allocations -------------------------------------------------------------------------------

    def create(self, device: int, nbytes: int, *, exportable: bool = True) -> Allocation:
        self._check_device("cuMemCreate", device)
        self._check_sizes("cuMemCreate", nbytes)
        with self._lock:
            # Reading what all processes have takes long: only where the bound does not suffice.
            if nbytes > self._unused_bytes(device) and nbytes > self.free_bytes(device):
                raise InsufficientMemory("cuMemCreate: out of memory (CUDA_ERROR_OUT_OF_MEMORY)", should_retry=True)
            fd = os.memfd_create(f"{_MEMFD}-{device}", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
            self._created[os.fstat(fd).st_ino] = (device, nbytes)
            handle = self._add(fd)
            if not exportable:
                self._private.add(handle)
            return handle

    def release(self, allocation: Allocation) -> None:
        with self._lock:
            if allocation not in self.handles:
                raise _invalid("cuMemRelease", f"{allocation} is no handle")
            os.close(self.handles.pop(allocation))
            self._private.discard(allocation)

    def export_descriptor(self, allocation: Allocation) -> int:
        with self._lock:
            descriptor = self._fd("cuMemExportToShareableHandle", allocation)
            if allocation in self._private:
                raise _invalid("cuMemExportToShareableHandle", "the allocation was not created for export")
            return os.dup(descriptor)

    def import_descriptor(self, descriptor: int) -> Allocation:
        with contextlib.suppress(OSError):
            if str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(f"/memfd:{_MEMFD}-"):
                with self._lock:
                    return self._add(os.dup(descriptor))
        raise _invalid("cuMemImportFromShareableHandle", f"descriptor {descriptor} is no allocation")

    def free_bytes(self, device: int) -> int:
        """Return the device's memory that no handle, descriptor or mapping of any process keeps.

        A descriptor on its way through a socket is not seen.
        """
        with self._lock:
            if self._created:
                live = _live_inodes(self._created)
                self._created = {inode: entry for inode, entry in self._created.items() if inode in live}
            return self._unused_bytes(device)

    def _unused_bytes(self, device: int) -> int:
        return self._total_bytes - sum(n for d, n in self._created.values() if d == device)

    # -- addresses ---------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> int:
        self._check_sizes("cuMemAddressReserve", nbytes)
        with self._lock:
            # The kernel aligns to its own pages, CUDA to the granularity.
            start = _mmap(None, nbytes + self.granularity_bytes, -1)
            address = -(-start // self.granularity_bytes) * self.granularity_bytes
            if address > start:
                _libc.munmap(start, address - start)
            _libc.munmap(address + nbytes, self.granularity_bytes - (address - start))
            self.reservations[address] = nbytes
            return address

    def free_reservation(self, address: int, nbytes: int) -> None:
        with self._lock:
            if self.reservations.get(address) != nbytes:
                raise _invalid("cuMemAddressFree", "no reservation has this address and size")
            if self._within(address, nbytes):
                raise _invalid("cuMemAddressFree", "memory is mapped there")
            _libc.munmap(address, nbytes)
            del self.reservations[address]

    def map(self, address: int, nbytes: int, allocation: Allocation) -> None:
        self._check_sizes("cuMemMap", nbytes, address)
        with self._lock:
            fd = self._fd("cuMemMap", allocation)
            if os.fstat(fd).st_size != nbytes:
                raise _invalid("cuMemMap", "the size is not that of the allocation")
            if not any(a <= address and address + nbytes <= a + n for a, n in self.reservations.items()):
                raise _invalid("cuMemMap", "the addresses are not reserved")
            if self._within(address, nbytes):
                raise _invalid("cuMemMap", "memory is mapped there already")
            _mmap(address, nbytes, fd)
            inode = os.fstat(fd).st_ino
            self.mappings[address] = Mapping(nbytes, inode, self._created.get(inode, (None, 0))[0])

    def unmap(self, address: int, nbytes: int) -> None:
        with self._lock:
            found = self.mappings.get(address)
            if found is None or found.nbytes != nbytes:
                raise _invalid("cuMemUnmap", "no mapping has this address and size")
            if any(a < address + nbytes and address < a + n for a, n in self._in_use):
                raise _invalid("cuMemUnmap", "work that was issued may still use the memory")
            _mmap(address, nbytes, -1)
            del self.mappings[address]

    def set_access(self, address: int, nbytes: int, device: int, *, writable: bool) -> None:
        self._check_device("cuMemSetAccess", device)
        with self._lock:
            found = self._within(address, nbytes)
            inside = all(address <= a and a + m.nbytes <= address + nbytes for a, m in found.items())
            if not inside or sum(m.nbytes for m in found.values()) != nbytes:
                raise _invalid("cuMemSetAccess", "the range is not made of whole mappings")
            if not self.has_links and any(m.device not in (None, device) for m in found.values()):
                raise _invalid("cuMemSetAccess", "the device has no access to the other one's memory")
            for at, mapping in found.items():
                mapping.access[device] = "rw" if writable else "r"
                # The kernel has one right for all devices: the greatest.
                rights = mmap.PROT_READ | (mmap.PROT_WRITE if "rw" in mapping.access.values() else 0)
                if _libc.mprotect(at, mapping.nbytes, rights):
                    raise _invalid("cuMemSetAccess", os.strerror(ctypes.get_errno()))

    def issue(self, address: int, nbytes: int) -> None:
        """Take note of work that uses a range until `synchronize`. Unmapping it is an error."""
        with self._lock:
            self._in_use.append((address, nbytes))

    def synchronize(self) -> None:
        """Wait for all work."""
        with self._lock:
            self._in_use.clear()

    def can_access(self, address: int, nbytes: int, *, writable: bool, device: int = 0) -> bool:
        """True if the device may read, or write, the whole range."""
        with self._lock:
            found = self._within(address, nbytes)
            wanted = ("rw",) if writable else ("r", "rw")
            there = {a: m for a, m in found.items() if m.access.get(device) in wanted}
            return sum(min(address + nbytes, a + m.nbytes) - max(address, a) for a, m in there.items()) == nbytes

    # -- checks ------------------------------------------------------------------------------------

    def _add(self, fd: int) -> Allocation:
        handle = Allocation(next(self._numbers))
        self.handles[handle] = fd
        return handle

    def _fd(self, call: str, allocation: Allocation) -> int:
        if allocation not in self.handles:
            raise _invalid(call, f"{allocation} is no handle")
        return self.handles[allocation]

    def _within(self, address: int, nbytes: int) -> dict[int, Mapping]:
        return {a: m for a, m in self.mappings.items() if a < address + nbytes and address < a + m.nbytes}

    def _check_sizes(self, call: str, *values: int) -> None:
        if any(value <= 0 or value % self.granularity_bytes for value in values):
            raise _invalid(call, f"{values} are no multiples of {self.granularity_bytes} bytes")

    def _check_device(self, call: str, device: int) -> None:
        if not self.is_supported(device):
            raise DeviceFailed(f"{call}: invalid device ordinal (CUDA_ERROR_INVALID_DEVICE)")


def _invalid(call: str, reason: str) -> DeviceFailed:
    return DeviceFailed(f"{call}: invalid argument (CUDA_ERROR_INVALID_VALUE); {reason}")


def _mmap(address: int | None, nbytes: int, fd: int) -> int:
    """Map the file, or addresses without memory, without access."""
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    found = _libc.mmap(address, nbytes, _PROT_NONE, flags | (_MAP_FIXED if address is not None else 0), fd, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise InsufficientMemory(f"mmap: {errno.errorcode.get(code, code)}", should_retry=True)
    return int(found)


def _live_inodes(wanted: dict[int, tuple[int, int]]) -> set[int]:
    """Return the allocations that a process has open or mapped."""
    found: set[int] = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            found |= {int(line.split()[4]) for line in (process / "maps").read_text().splitlines() if _MEMFD in line}
        with contextlib.suppress(OSError):
            for path in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if _MEMFD in str(path.readlink()):
                        found.add(path.stat().st_ino)
    return found & wanted.keys()
