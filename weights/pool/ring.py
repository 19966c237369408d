"""Memory for what is read, taken and done with in order: a range of any length, of which a window has memory.

What is done with gives its pages to what comes next (`mremap` moves them without a copy), so that reading waits neither for the kernel's zeroing
nor for more memory than the window's.
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
    """`nbytes` of private memory at consecutive addresses, as a `Region`'s readers write it. Chunks of it get memory when a reading thread
    `enter`s them: what another one has been `release`d of, or fresh.

    `ahead`: how many chunks from the one that is being taken on may have memory; None: all. One thread takes, many read.
    """

    def __init__(self, nbytes: int, ahead: int | None = None) -> None:
        """Raises `InsufficientMemory` if the window is more than the host has."""
        self.nbytes, self._ahead = nbytes, ahead
        self.count = -(-nbytes // CHUNK_BYTES)
        needed = min(nbytes, nbytes if ahead is None else ahead * CHUNK_BYTES)
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
        self._limit = self.count if ahead is None else ahead
        self._has: set[int] = set()
        self._released: deque[int] = deque()
        self._closed = False
        self.moved = 0
        """Chunks that got another's memory."""

    # -- the reading threads -------------------------------------------------------------------------------------------------------

    def enter(self, offset: int) -> None:
        """Have memory for the chunk of this byte, when its turn has come. Raises `Cancelled` after `close`, `InsufficientMemory`."""
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
                    self.moved += 1
                    return
        # ctypes lets other threads run meanwhile. A kernel without it faults page by page instead.
        failed = _libc.madvise(self._address + chunk * CHUNK_BYTES, CHUNK_BYTES, _MADV_POPULATE_WRITE)
        if failed and ctypes.get_errno() == errno.ENOMEM:
            raise _no_room(CHUNK_BYTES)

    def _move(self, chunk: int, to: int) -> bool:
        """Where the kernel refuses, the memory goes back to it."""
        source, target = (self._address + c * CHUNK_BYTES for c in (chunk, to))
        if _libc.mremap(source, CHUNK_BYTES, CHUNK_BYTES, _MOVE_PAGES, target) == target:
            return True
        _libc.madvise(source, CHUNK_BYTES, _MADV_DONTNEED)
        return False

    def populate(self, offset: int, length: int) -> None:
        """`enter` did."""

    def is_ready(self, offset: int, length: int) -> bool:
        return True

    def write(self, offset: int, data: memoryview | bytes) -> None:
        self._view[offset : offset + len(data)] = data

    def copy(self, offset: int, data: memoryview) -> None:
        self.write(offset, data)

    def view(self, offset: int, length: int) -> memoryview:
        """These bytes. What refers to it, or to a part of it, keeps the whole range mapped, and not what the chunk holds."""
        return self._view[offset : offset + length]

    # -- who takes -----------------------------------------------------------------------------------------------------------------

    def want(self, start: int, end: int) -> None:
        """The bytes from `start` to `end` are taken next: they may be read, and the window goes on from there."""
        with self._changed:
            ahead = self.count if self._ahead is None else start // CHUNK_BYTES + self._ahead
            self._limit = max(self._limit, ahead, -(-end // CHUNK_BYTES))
            self._changed.notify_all()

    def release(self, chunk: int) -> None:
        """Nobody reads into this chunk or needs what is in it any more."""
        with self._changed:
            if self._closed:
                self._give_back(chunk)
            else:
                self._released.append(chunk)

    def close(self) -> None:
        """No more is read; memory that nobody needs goes back. Threads that wait to read get `Cancelled`."""
        with self._changed:
            self._closed = True
            while self._released:
                self._give_back(self._released.popleft())
            self._changed.notify_all()

    def _give_back(self, chunk: int) -> None:
        _libc.madvise(self._address + chunk * CHUNK_BYTES, CHUNK_BYTES, _MADV_DONTNEED)


def _no_room(nbytes: int) -> InsufficientMemory:
    return InsufficientMemory(
        f"reading the weights takes {nbytes / GIB:.2f} GiB of memory and the host has {available_memory() / GIB:.2f} GiB: "
        "put other models to sleep, or lower the devices' budgets",
        should_retry=True,
    )
