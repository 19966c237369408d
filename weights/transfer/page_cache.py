"""Find how much of a file is in the page cache, without a side effect.

A read that must not wait (`RWF_NOWAIT`) would start a read-ahead of uncached bytes, and the disk
would read them twice.
"""

from __future__ import annotations

import ctypes
import errno
import os

from shared.contracts.segment import PAGE

_CACHESTAT = 451
"""Linux 6.5, the same number on every architecture."""
_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


def cached_bytes(fd: int, offset: int, length: int) -> int | None:
    """Return the bytes of a range in the page cache, in whole pages.

    None on a kernel that cannot report it.

    Raises:
        OSError: The call failed.
    """
    asked, stat = _Range(offset, length), _Stat()
    if _libc.syscall(_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(stat), 0) == 0:
        return int(stat.cached) * PAGE
    code = ctypes.get_errno()
    if code in (
        errno.ENOSYS,
        errno.EOPNOTSUPP,
        errno.EPERM,
    ):  # an older kernel; a file system without it; a filter that does not know it
        return None
    raise OSError(code, os.strerror(code))
