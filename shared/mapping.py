"""Map extents of a file at consecutive addresses.

Readers see the chunks of a weight segment as one range. All bytes are locked before they are mapped
(`file_locks`), so that the loader knows which it must not reuse.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from shared.contracts.segment import Extent
from shared.file_locks import lock_mapped

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_MADV_POPULATE_READ = 22
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def map_extents(path: Path | str, extents: Sequence[Extent] = (), nbytes: int | None = None) -> mmap.mmap:
    """Map `extents` of the file as one private, writable range.

    The file is opened read-only. A write stays in this process; a page never written shows the
    file's current content. The range is unmapped when nothing refers to it any more.

    Args:
        extents: Extents in order; none: the whole file.
        nbytes: Bytes to map; default: all.

    Raises:
        OSError: The file cannot be opened or mapped.
        ValueError: An extent is beyond the file's end.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return map_descriptor(fd, extents, nbytes)
    finally:
        os.close(fd)


def map_descriptor(fd: int, extents: Sequence[Extent] = (), nbytes: int | None = None) -> mmap.mmap:
    """`map_extents` of an open file."""
    size = os.fstat(fd).st_size
    runs = coalesce(extents) if extents else [Extent(offset=0, nbytes=size)]
    if any(run.offset + run.nbytes > size for run in runs):
        # An access beyond the end would be SIGBUS.
        raise ValueError(f"extents end at {max(r.offset + r.nbytes for r in runs)}, beyond the file's {size} bytes")
    total = sum(run.nbytes for run in runs)
    if nbytes is not None and nbytes > total:
        raise ValueError(f"the extents hold {total} bytes, fewer than {nbytes}")
    wanted = total if nbytes is None else nbytes
    # One range is reserved, so that its parts lie side by side whatever else this process maps
    # meanwhile; its own pages are never touched.
    area = mmap.mmap(-1, wanted, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    _map_runs(_address(area), fd, runs, wanted)
    return area


class ReservedRange:
    """Addresses without memory, for extents of files that become known one after the other.

    An access to bytes that are not mapped yet ends the process. `area` keeps all mappings alive.
    """

    def __init__(self, nbytes: int) -> None:
        """Reserve `nbytes`. Raises `OSError` if the process has no such range."""
        self.area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        if _libc.mprotect(_address(self.area), nbytes, _PROT_NONE):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def map(self, start: int, fd: int, extents: Sequence[Extent]) -> None:
        """Map `extents` of the file from byte `start` on, as `map_extents` does.

        What was mapped there is replaced.

        Raises:
            OSError: They cannot be mapped.
            ValueError: They are beyond the range or the file.
        """
        map_over(self.area, start, fd, extents)


def map_over(area: mmap.mmap, start: int, fd: int, extents: Sequence[Extent]) -> None:
    """Replace the bytes of `area` from `start` on by a private mapping of `extents`.

    Raises:
        OSError: They cannot be mapped.
        ValueError: They are beyond the area or the file.
    """
    nbytes, size = sum(e.nbytes for e in extents), os.fstat(fd).st_size
    if start < 0 or start + nbytes > len(area) or any(e.offset + e.nbytes > size for e in extents):
        raise ValueError(f"extents of {nbytes} bytes do not fit at {start} of {len(area)} bytes, or into a file of {size}")
    _map_runs(_address(area) + start, fd, coalesce(extents), nbytes)


def populate_for_reading(address: int, nbytes: int) -> None:
    """Enter mapped pages into this process's page table, so that the first reads do not fault.

    Other threads run meanwhile. Has no effect on a kernel before 5.14.
    """
    start = address - address % mmap.PAGESIZE
    _libc.madvise(start, address + nbytes - start, _MADV_POPULATE_READ)


def _address(area: mmap.mmap) -> int:
    anchor = ctypes.c_char.from_buffer(area)
    return ctypes.addressof(anchor)


def _map_runs(address: int, fd: int, runs: Sequence[Extent], wanted: int) -> None:
    at = 0
    for run in runs:
        length = min(run.nbytes, wanted - at)
        if length <= 0:
            break
        lock_mapped(fd, run.offset, length)
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        got = _libc.mmap(address + at, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, run.offset)
        if got != address + at:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        at += length


def coalesce(extents: Sequence[Extent]) -> list[Extent]:
    """Join adjacent extents, in order, so that the kernel keeps fewer mappings."""
    runs: list[Extent] = []
    for extent in extents:
        if runs and runs[-1].offset + runs[-1].nbytes == extent.offset:
            runs[-1] = Extent(offset=runs[-1].offset, nbytes=runs[-1].nbytes + extent.nbytes)
        else:
            runs.append(extent)
    return runs
