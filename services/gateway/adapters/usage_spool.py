"""Files of usage records that survive the end of their gateway.

Each gateway appends to a file of its own, which it locks. A gateway that starts adopts the files of
gateways that ended: those that no process has locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import time
from pathlib import Path

from shared.private import make_private

log = logging.getLogger(__name__)
READ_BYTES = 256 << 10
_SUFFIX = ".usage"
_ALLOCATED_BYTES = 64 << 10
"""Blocks of so many bytes are allocated at once: of some hundred records."""
_MAX_AGE_S = 30 * 24 * 3600
"""The ledger may have forgotten how far it recorded an older spool."""


class UsageSpool:
    """One file of records. All methods block for as long as the page cache takes.

    The file is mapped into memory: to write a record there takes less than a system call, and the
    record survives the process just as well. Blocks are allocated before they are written, so that
    a full disk is an error rather than a signal. The file ends with zeros until it is closed.

    Attributes:
        name: Name of the spool in the ledger.
        position: The ledger has the records before it.
    """

    def __init__(self, path: Path | None, descriptor: int, name: str = "") -> None:
        """Take an open file; without a path it is in memory, and has a name."""
        self.name = path.name.removesuffix(_SUFFIX) if path is not None else name
        self.position = 0
        self._path = path
        self._descriptor = descriptor
        self._size = _find_end(descriptor)
        self._map: mmap.mmap | None = None
        self._allocated = 0

    @classmethod
    def open(cls, path: Path) -> UsageSpool | None:
        """Open and lock a file, created if missing; None if another process has it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return cls(path, descriptor)

    @classmethod
    def in_memory(cls, name: str) -> UsageSpool:
        """Make a spool whose records are lost with the process. Raises `OSError`."""
        return cls(None, os.memfd_create(name, os.MFD_CLOEXEC), name)

    @property
    def is_in_memory(self) -> bool:
        return self._path is None

    @property
    def size(self) -> int:
        return self._size

    @property
    def unreported(self) -> int:
        """Bytes that the ledger does not have."""
        return max(0, self._size - self.position)

    def append(self, line: bytes) -> None:
        """Write a record. Raises `OSError` if the disk is full, for example."""
        end = self._size + len(line)
        if end > self._allocated or self._map is None:
            self._map = self._allocate(end)
        self._map[self._size : end] = line
        self._size = end

    def _allocate(self, end: int) -> mmap.mmap:
        """Have blocks for the bytes before `end` and some more, and map them."""
        allocated = -(-end // _ALLOCATED_BYTES) * _ALLOCATED_BYTES
        os.posix_fallocate(self._descriptor, 0, allocated)
        mapped = mmap.mmap(self._descriptor, allocated)
        self._unmap()
        self._allocated = allocated
        return mapped

    def _unmap(self) -> None:
        if self._map is not None:
            self._map.close()
        self._map, self._allocated = None, 0

    def read_all(self) -> bytes:
        """Read the whole file."""
        found = bytearray()
        while len(found) < self._size and (part := os.pread(self._descriptor, READ_BYTES, len(found))):
            found += part
        return bytes(found[: self._size])

    def read(self) -> bytes:
        """Read records that the ledger does not have."""
        return os.pread(self._descriptor, min(READ_BYTES, self.unreported), self.position)

    def remove(self) -> None:
        """Delete the file, all of which the ledger has: it counts nothing of it again."""
        self._unmap()
        try:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
        except OSError as e:
            log.warning("failed to remove a usage spool", extra={"path": str(self._path), "error": str(e)})
        os.close(self._descriptor)

    def close(self) -> None:
        self._unmap()
        with contextlib.suppress(OSError):  # the next gateway leaves the zeros out as well
            os.ftruncate(self._descriptor, self._size)
        os.close(self._descriptor)


def _find_end(descriptor: int) -> int:
    """Return where the zeros begin at the end of a file whose process was killed."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - READ_BYTES)
        if kept := os.pread(descriptor, end - start, start).rstrip(b"\0"):
            return start + len(kept)
        end = start
    return 0


def open_own_spool(directory: Path, own: str) -> UsageSpool:
    """Open a spool of this gateway.

    Raises:
        OSError: The directory or the file cannot be made.
    """
    make_private(directory)
    spool = UsageSpool.open(directory / f"{own}{_SUFFIX}")
    if spool is None:
        raise OSError(f"another process has the spool of gateway {own}")
    return spool


def open_spools(directory: Path, own: str) -> tuple[UsageSpool, list[UsageSpool]]:
    """Open this gateway's spool, and those of gateways that ended. Raises as `open_own_spool`."""
    spool, adopted = open_own_spool(directory, own), list[UsageSpool]()
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        if path.name == f"{own}{_SUFFIX}":
            continue
        try:
            if time.time() - path.stat().st_mtime > _MAX_AGE_S:
                log.warning("ignored a usage spool that is too old", extra={"path": str(path)})
                continue
            found = UsageSpool.open(path)
        except OSError as e:
            log.warning("failed to open a usage spool", extra={"path": str(path), "error": str(e)})
            continue
        if found is not None:
            adopted.append(found)
    return spool, adopted
