"""The pool's file: mapped, its pages allocated and freed, with proof."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

from shared.contracts.segment import PAGE
from shared.file_locks import is_locked
from weights.pool import numa, shm
from weights.pool.block_count import BlockCount
from weights.pool.chunks import CHUNK_BYTES

log = logging.getLogger(__name__)
_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_HUGE = 2 * 1024 * 1024
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)

Pages = Literal["small", "huge"]
Hook = Callable[[int, int], None]
"""Called with address and length of a chunk that was just populated, or is about to lose its
memory.
"""


class PoolMemory:
    """Chunks of one file under /dev/shm, which is mapped as a whole.

    `allocate` gives chunks memory and `punch` frees it. Chunks are numbered from 0 and are
    consecutive. Methods may be called from several threads, for different chunks.
    """

    def __init__(
        self,
        name: str | None,
        nbytes: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        keep: bool = False,
        on_populated: Hook | None = None,
        on_punch: Hook | None = None,
    ) -> None:
        """Create a file of `nbytes`, without memory at first.

        Args:
            name: Name of the file; None: without a name, removed with its last mapping.
            chunk_bytes: Size of a chunk; a multiple of a huge page for `prepare_huge`.
            keep: Use an existing file unchanged.
            on_populated: Called to page-lock chunks; with it the loader keeps complete chunks
                mapped.
        """
        self.name, self.nbytes, self.chunk_bytes = name, nbytes, chunk_bytes
        self._on_populated, self._on_punch = on_populated, on_punch
        self._blocks = BlockCount()
        self._ready: dict[int, int] = {}
        self._unlocked: frozenset[int] = frozenset()
        self._fd = _open(name, keep=keep)
        try:
            if os.fstat(self._fd).st_size < nbytes:
                os.ftruncate(self._fd, nbytes)
            self.nbytes = max(nbytes, os.fstat(self._fd).st_size)
            self._map = _map_file(self._fd, self.nbytes)
        except OSError:
            os.close(self._fd)
            raise
        self._view = memoryview(self._map)
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(self._anchor)

    @property
    def count(self) -> int:
        return self.nbytes // self.chunk_bytes

    @property
    def path(self) -> Path:
        assert self.name is not None
        return shm.SHM / self.name

    @property
    def fd(self) -> int:
        return self._fd

    def bind(self, node: int) -> None:
        """Take all memory from this NUMA node, whichever process allocates it. Raises `OSError`."""
        numa.bind(self._address, self.nbytes, node)

    def bound_to(self) -> tuple[int, ...] | None:
        """Return the NUMA nodes of `bind`, read back; None without a binding. Raises `OSError`."""
        return numa.bound_to(self._address)

    # -- allocating --------------------------------------------------------------------------------

    def allocate(self, offset: int, length: int) -> None:
        """Allocate these bytes without zeroing or mapping pages.

        Raises `OSError` (ENOSPC) without memory: never SIGBUS later.
        """
        with self._blocks.changing():
            os.posix_fallocate(self._fd, offset, length)

    def populate(self, offset: int, length: int, *, huge: bool = False) -> Pages | None:
        """`allocate`, and map the pages at once: later reads into them do not fault.

        Within one chunk; `offset` starts a page.

        Args:
            huge: Use huge pages where a whole one fits and the kernel grants it. A direct read
                needs a descriptor for each run of memory, and a disk's request has few of them; and
                there are fewer pages to look up, map and unmap.

        Returns:
            The kind of pages added; None if these bytes already had memory.
        """
        chunk, end = offset // self.chunk_bytes, offset % self.chunk_bytes + length
        if self._ready.get(chunk, 0) >= end:
            return None
        had = self.has_memory(offset, length)
        is_huge = huge and not had and self._collapse(offset, length)
        self.allocate(offset, length)
        # ctypes releases the GIL, mmap.madvise would not. A kernel without it faults page by page
        # instead.
        _libc.madvise(self._address + offset, length, _MADV_POPULATE_WRITE)
        if offset % self.chunk_bytes <= self._ready.get(chunk, 0):
            self._ready[chunk] = end
        # A chunk of a partial load has memory in parts: page-locking it would fill the gaps.
        if self._ready.get(chunk, 0) >= self.chunk_bytes and self._on_populated is not None:
            self._on_populated(self._address + chunk * self.chunk_bytes, self.chunk_bytes)
        return None if had else "huge" if is_huge else "small"

    def _collapse(self, offset: int, length: int) -> bool:
        """Give the whole huge pages of this range memory.

        MADV_COLLAPSE needs no permission, and works where faults get no huge pages of shared memory
        (shmem_enabled=never, the default of most distributions).

        Returns:
            True if the kernel granted each.
        """
        start, end = -(-offset // _HUGE) * _HUGE, (offset + length) // _HUGE * _HUGE
        if start >= end:
            return False
        with self._blocks.changing():
            for at in range(start, end, _HUGE):
                _libc.madvise(self._address + at, PAGE, _MADV_POPULATE_WRITE)  # where nothing is there is nothing to collapse
            return not _libc.madvise(self._address + start, end - start, _MADV_COLLAPSE)

    def is_ready(self, offset: int, length: int) -> bool:
        """True if these bytes, within one chunk, were populated and are still mapped here."""
        return self._ready.get(offset // self.chunk_bytes, 0) >= offset % self.chunk_bytes + length

    def prepare(self, chunk: int) -> None:
        """Allocate and map the whole chunk for the next load."""
        self.populate(chunk * self.chunk_bytes, self.chunk_bytes)

    def prepare_huge(self, chunk: int) -> bool:
        """`prepare` with huge pages if the kernel has them.

        Returns:
            True if the whole chunk has them. With little free memory the kernel may grant a part.
        """
        is_huge = self._collapse(chunk * self.chunk_bytes, self.chunk_bytes)
        self.prepare(chunk)
        return is_huge

    def write(self, offset: int, data: memoryview) -> None:
        """Write through the descriptor: new pages are neither zeroed nor mapped first.

        Raises `OSError` (ENOSPC).
        """
        done = 0
        while done < len(data):
            with data[done:] as rest:
                done += os.pwrite(self._fd, rest, offset + done)

    def view(self, offset: int, length: int) -> memoryview:
        """Return these bytes. Release them before the pool is closed."""
        return self._view[offset : offset + length]

    # -- freeing -----------------------------------------------------------------------------------

    def zap(self, chunk: int, length: int | None = None) -> None:
        """Unmap the chunk's pages here; their content stays.

        A page that only its readers map can be paged out with them, and is counted once.
        Page-locked chunks stay.
        """
        if self._on_populated is None:
            self._ready.pop(chunk, None)
            _libc.madvise(self._address + chunk * self.chunk_bytes, length or self.chunk_bytes, _MADV_DONTNEED)

    def punch(self, chunks: Iterable[int]) -> int:
        """Free the memory of `chunks`.

        Returns by how many bytes the file shrank, read back from the kernel.
        """
        freed = 0
        for offset, length in _runs(sorted(chunks), self.chunk_bytes):
            for at in range(offset, offset + length, self.chunk_bytes):
                self._ready.pop(at // self.chunk_bytes, None)
                if self._on_punch is not None:
                    self._on_punch(self._address + at, self.chunk_bytes)
            with self._blocks.counting():
                before = self.count_allocated()
                if _libc.fallocate(self._fd, _PUNCH_HOLE, offset, length):
                    error = ctypes.get_errno()
                    raise OSError(error, os.strerror(error))
                freed += max(0, before - self.count_allocated())
            self._prove_empty(offset, length)
        return freed

    def discard(self, offset: int, length: int) -> int:
        """Free the memory of some bytes of chunks that stay in use.

        Returns by how many bytes the file shrank, read back from the kernel. Whole pages
        are freed, and the rest of partial ones is zeroed.
        """
        for chunk in range(offset // self.chunk_bytes, -(-(offset + length) // self.chunk_bytes)):
            self._ready.pop(chunk, None)
            if self._on_punch is not None:  # a device would read the freed pages in later copies
                self._on_punch(self._address + chunk * self.chunk_bytes, self.chunk_bytes)
        with self._blocks.counting():
            before = self.count_allocated()
            if _libc.fallocate(self._fd, _PUNCH_HOLE, offset, length):
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))
            return max(0, before - self.count_allocated())

    def _prove_empty(self, offset: int, length: int) -> None:
        try:
            data = os.lseek(self._fd, offset, os.SEEK_DATA)
        except OSError as e:
            if e.errno == errno.ENXIO:  # nothing up to the file's end
                return
            raise
        if data < offset + length:
            raise OSError(errno.EBUSY, f"memory of the pool at {data} was touched while it was given back")

    def count_allocated(self) -> int:
        """Bytes of memory that the file has."""
        return os.fstat(self._fd).st_blocks * 512

    def has_memory(self, offset: int, length: int) -> bool:
        """True if every page of these bytes has been written."""
        return os.lseek(self._fd, offset, os.SEEK_HOLE) >= offset + length

    def mapped_among(self, chunks: Iterable[int]) -> frozenset[int]:
        """Return those of the chunks that other processes map.

        The source are the locks that a process takes before it maps (`shared.file_locks`), and
        /proc/*/maps as long as `mapped_by_others` has found a process without locks.
        """
        wanted = sorted(chunks)
        found: set[int] = set()
        for offset, length in _runs(wanted, self.chunk_bytes):
            if is_locked(self._fd, offset, length):
                found.update(c for c in self._numbers(offset, length) if self._is_locked(c))
        if self._unlocked:
            found.update(self.mapped_by_others().keys() & set(wanted))
        return frozenset(found)

    def _numbers(self, offset: int, length: int) -> range:
        return range(offset // self.chunk_bytes, (offset + length) // self.chunk_bytes)

    def _is_locked(self, chunk: int) -> bool:
        return is_locked(self._fd, chunk * self.chunk_bytes, self.chunk_bytes)

    def mapped_by_others(self, mappings: Mapping[int, bytes] | None = None) -> dict[int, list[int]]:
        """Return the chunks that other processes map, and these processes.

        Args:
            mappings: Those that `read_mappings` has just returned; None: they are read now.
        """
        stat = os.fstat(self._fd)
        inode = f"{_device_in_maps(stat.st_dev)}{stat.st_ino} ".encode()
        found: dict[int, list[int]] = {}
        for pid, maps in (read_mappings() if mappings is None else mappings).items():
            if inode in maps:
                for chunk in _mapped_chunks(maps, inode, self.chunk_bytes):
                    found.setdefault(chunk, []).append(pid)
        self._unlocked = frozenset(c for c in found if not self._is_locked(c))
        return found

    # -- closing -----------------------------------------------------------------------------------

    def detach(self) -> mmap.mmap:
        """End writing and hand over the mapping, which lives until its last reference."""
        kept = self._map
        self._release()
        return kept

    def close(self, *, unlink: bool = False) -> None:
        """Unmap. The file stays, with what it holds, unless `unlink`."""
        if unlink and self.name is not None:
            self.path.unlink(missing_ok=True)
        kept = self._map
        self._release()
        kept.close()

    def _release(self) -> None:
        os.close(self._fd)
        self._view.release()
        self._anchor = None
        del self._map  # the receiver keeps the memory now


def read_mappings() -> dict[int, bytes]:
    """Return the lines of /proc/PID/maps about shared memory, by process, without this process.

    Of the processes that this process may inspect: some milliseconds on a small machine, and more
    with each process and mapping.
    """
    device, own = _device_in_maps(shm.SHM.stat().st_dev).encode(), os.getpid()
    found: dict[int, bytes] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        if (pid := int(directory.name)) == own:
            continue
        try:
            maps = (directory / "maps").read_bytes()
        except OSError:  # it has just ended, or is not ours
            continue
        if device in maps:
            found[pid] = b"\n".join(line for line in maps.splitlines() if device in line)
    return found


def _device_in_maps(device: int) -> str:
    return f" {os.major(device):02x}:{os.minor(device):02x} "


def _open(name: str | None, *, keep: bool) -> int:
    if name is None:
        return os.open(shm.SHM, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_NOFOLLOW if keep else os.O_EXCL)
    while True:
        fd = os.open(shm.SHM / name, flags, 0o600)
        # Held while this process, or a receiver of its descriptor, lives: the sweeper takes
        # unlocked pools only (sweeping.py).
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # it was swept meanwhile


def _map_file(fd: int, nbytes: int) -> mmap.mmap:
    """Map the file shared, at an address where a huge page may begin.

    Kernels from 6.7 on place private areas of whole huge pages there.
    """
    try:
        area = mmap.mmap(-1, -(-nbytes // _HUGE) * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError:  # a kernel that promises no more memory than it has (vm.overcommit_memory=2)
        return mmap.mmap(fd, nbytes)
    anchor = ctypes.c_char.from_buffer(area)
    address = ctypes.addressof(anchor)
    del anchor
    if _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return area


def _runs(chunks: list[int], chunk_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of each run of neighbours."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        offset = chunk * chunk_bytes
        if runs and sum(runs[-1]) == offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + chunk_bytes)
        else:
            runs.append((offset, chunk_bytes))
    return runs


def _mapped_chunks(maps: bytes, inode: bytes, chunk_bytes: int) -> set[int]:
    chunks: set[int] = set()
    for line in maps.splitlines():
        if inode in line:
            addresses, _, offset, _ = line.split(maxsplit=3)
            low, _, high = addresses.partition(b"-")
            start, length = int(offset, 16), int(high, 16) - int(low, 16)
            chunks.update(range(start // chunk_bytes, -(-(start + length) // chunk_bytes)))
    return chunks


assert CHUNK_BYTES % PAGE == 0
