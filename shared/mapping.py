"""Map extents of a file at consecutive addresses.

Readers see the chunks of a weight segment as one range.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from shared.contracts.segment import Extent

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
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
    runs = coalesced(extents) if extents else [Extent(offset=0, nbytes=size)]
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
    anchor = ctypes.c_char.from_buffer(area)
    address, at = ctypes.addressof(anchor), 0
    del anchor
    for run in runs:
        length = min(run.nbytes, wanted - at)
        if length <= 0:
            break
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        got = _libc.mmap(address + at, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, run.offset)
        if got != address + at:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        at += length
    return area


def coalesced(extents: Sequence[Extent]) -> list[Extent]:
    """Join adjacent extents, in order, so that the kernel keeps fewer mappings."""
    runs: list[Extent] = []
    for extent in extents:
        if runs and runs[-1].offset + runs[-1].nbytes == extent.offset:
            runs[-1] = Extent(offset=runs[-1].offset, nbytes=runs[-1].nbytes + extent.nbytes)
        else:
            runs.append(extent)
    return runs
