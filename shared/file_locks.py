"""Locks of byte ranges, by which a process declares what it maps of a file (ADR 0088).

A process locks the bytes before it maps them, with a shared lock of the open file description
(fcntl(2), F_OFD_SETLK). The kernel drops the lock when nothing refers to the description any more:
no descriptor and no mapping, including those that a fork copied. However the process ends, a byte
without a lock is therefore mapped by no process that locks first.
"""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock: l_type, l_whence, l_start, l_len, l_pid."""


def lock_mapped(fd: int, offset: int, nbytes: int) -> None:
    """Declare that mappings of this open file may have these bytes.

    Args:
        fd: Open for reading.

    Raises:
        OSError: The file has no such locks.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack(fcntl.F_RDLCK, offset, nbytes))


def unlock_mapped(fd: int, offset: int, nbytes: int) -> None:
    """Declare that no mapping of this open file has these bytes any more. Raises `OSError`."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack(fcntl.F_UNLCK, offset, nbytes))


def is_locked(fd: int, offset: int, nbytes: int) -> bool:
    """True if another open file description has locked one of these bytes. Raises `OSError`."""
    found = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _pack(fcntl.F_WRLCK, offset, nbytes)))
    return bool(found[0] != fcntl.F_UNLCK)


def _pack(kind: int, offset: int, nbytes: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, offset, nbytes, 0)
