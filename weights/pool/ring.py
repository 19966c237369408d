"""Manage memory for bytes that are read, consumed and released in order.

The range may have any length; only a window of it has memory. Released chunks give their pages to
the next ones (`mremap` moves them without a copy), so that reading waits neither for the kernel's
zeroing nor for more memory than the window's.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from collections import deque

from shared.errors import InsufficientMemory
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.shm import GIB, available_memory
from weights.tiers.port import Cancelled

_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MAP_NORESERVE = 0x4000
_MOVE_PAGES = 0x1 | 0x2 | 0x4  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, Linux 5.7
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class Ring:
    """`nbytes` of private memory at consecutive addresses.

    Readers use it like a `Region`. A chunk gets memory when a reading thread `enter`s it: that of a
    `release`d chunk, or fresh memory. One thread consumes, many read.

    Attributes:
        window_chunks: Chunks that may have memory, from the one being consumed on; None: all.
    """

    def __init__(self, nbytes: int, window_chunks: int | None = None) -> None:
        """Raises `InsufficientMemory` if the window is more than the host has."""
        self.nbytes, self._window_chunks = nbytes, window_chunks
        self.count = -(-nbytes // CHUNK_BYTES)
        needed = min(nbytes, nbytes if window_chunks is None else window_chunks * CHUNK_BYTES)
        if needed > available_memory():
            raise _no_room(needed)
        try:
            # Whole chunks: from kernel 6.7 on they begin where a page table does, and move as one.
            self._map = mmap.mmap(
                -1, max(1, self.count) * CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            )
        except OSError as e:  # a kernel that promises no more than it has (vm.overcommit_memory=2)
            raise _no_room(nbytes) from e
        anchor = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(anchor)
        del anchor
        self._view = memoryview(self._map)
        self._changed = threading.Condition()
        self._limit = self.count if window_chunks is None else window_chunks
        self._has: set[int] = set()
        self._released: deque[int] = deque()
        self._closed = False
        self.moved_chunks = 0
        """Chunks that got another's memory."""

    # -- the reading threads -----------------------------------------------------------------------

    def enter(self, offset: int) -> None:
        """Wait until the chunk of this byte is in the window, and give it memory.

        Raises `Cancelled` after `close`, `InsufficientMemory`.
        """
        chunk = offset // CHUNK_BYTES
        with self._changed:
            self._changed.wait_for(lambda: self._closed or chunk < self._limit)
            if self._closed:
                raise Cancelled
            if chunk in self._has:
                return
            self._has.add(chunk)
            while self._released:
                if self._move(self._released.popleft(), chunk):
                    self.moved_chunks += 1
                    return
        # ctypes releases the GIL. A kernel without it faults page by page instead.
        failed = _libc.madvise(self._address + chunk * CHUNK_BYTES, CHUNK_BYTES, _MADV_POPULATE_WRITE)
        if failed and ctypes.get_errno() == errno.ENOMEM:
            raise _no_room(CHUNK_BYTES)

    def _move(self, chunk: int, to: int) -> bool:
        """Move a chunk's pages; returns them to the kernel if it refuses."""
        source, target = (self._address + c * CHUNK_BYTES for c in (chunk, to))
        if _libc.mremap(source, CHUNK_BYTES, CHUNK_BYTES, _MOVE_PAGES, target) == target:
            return True
        _libc.madvise(source, CHUNK_BYTES, _MADV_DONTNEED)
        return False

    def populate(self, offset: int, length: int, *, huge: bool = False) -> None:
        """No-op: `enter` did."""

    def is_ready(self, offset: int, length: int) -> bool:
        return True

    def write(self, offset: int, data: memoryview | bytes) -> None:
        self._view[offset : offset + len(data)] = data

    def copy(self, offset: int, data: memoryview) -> None:
        self.write(offset, data)

    def view(self, offset: int, length: int) -> memoryview:
        """Return these bytes.

        References keep the whole range mapped, and not what the chunk holds.
        """
        return self._view[offset : offset + length]

    # -- the consumer ------------------------------------------------------------------------------

    def want(self, start: int, end: int) -> None:
        """Move the window to the bytes from `start` to `end`.

        They are consumed next, and may be read.
        """
        with self._changed:
            window_end = self.count if self._window_chunks is None else start // CHUNK_BYTES + self._window_chunks
            self._limit = max(self._limit, window_end, -(-end // CHUNK_BYTES))
            self._changed.notify_all()

    def release(self, chunk: int) -> None:
        """Release a chunk that is neither being read nor needed."""
        with self._changed:
            if self._closed:
                self._reclaim(chunk)
            else:
                self._released.append(chunk)

    def close(self) -> None:
        """Stop reading and free unneeded memory.

        Threads that wait to read get `Cancelled`.
        """
        with self._changed:
            self._closed = True
            while self._released:
                self._reclaim(self._released.popleft())
            self._changed.notify_all()

    def _reclaim(self, chunk: int) -> None:
        _libc.madvise(self._address + chunk * CHUNK_BYTES, CHUNK_BYTES, _MADV_DONTNEED)


def _no_room(nbytes: int) -> InsufficientMemory:
    return InsufficientMemory(
        f"Reading the weights takes {nbytes / GIB:.2f} GiB of memory and the host has {available_memory() / GIB:.2f} GiB: "
        "put other models to sleep, or lower the devices' budgets",
        should_retry=True,
    )
