"""Named shared memory under /dev/shm: made, filled, checked, and proved gone."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import select
import threading
import time
from pathlib import Path

from pydantic import ValidationError

from shared.contracts.segment import HEADER_BYTES, LAYOUT_VERSION, MAGIC, SegmentHeader
from shared.errors import InsufficientMemory

log = logging.getLogger(__name__)
SHM = Path("/dev/shm")
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
GIB = 1 << 30
_RESCAN_S = 0.1


class SegmentWriter:
    """A segment being filled, mapped here until `close` or `detach`. Its pages are allocated chunk by chunk, just before their bytes come:
    by `populate` for reads straight into `memory`, or by `copy`.
    """

    def __init__(self, name: str | None, total_bytes: int) -> None:
        """`name` None: a segment without a name, whose memory goes with its last mapping, however this process ends.

        Raises `InsufficientMemory` if there is no room for `total_bytes`.
        """
        self.name, self.total_bytes = name, total_bytes
        self._promise = _promise(total_bytes)
        try:
            self._fd = _create(name)
            try:
                os.ftruncate(self._fd, total_bytes)
                self._map = mmap.mmap(self._fd, total_bytes)
            except OSError:
                os.close(self._fd)
                self._unlink()
                raise
        except OSError:
            _kept(self._promise)
            raise
        self.memory = memoryview(self._map)
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(self._anchor)

    def populate(self, offset: int, length: int) -> None:
        """Allocate and map these pages now, in one go. A full /dev/shm shows here as `InsufficientMemory`, never as SIGBUS later.

        fallocate allocates without zeroing and says ENOSPC; the advice then zeroes and maps: no work is done twice, and the pair costs a
        fifth less CPU than the advice alone.
        """
        try:
            os.posix_fallocate(self._fd, offset, length)
        except OSError as e:
            raise self._no_room(e) from e
        # ctypes lets other threads run meanwhile, mmap.madvise would not. A kernel without it faults page by page instead.
        _libc.madvise(self._address + offset, length, _MADV_POPULATE_WRITE)
        _kept(self._promise, length)

    def copy(self, offset: int, data: memoryview | bytes) -> None:
        """Write `data` at `offset` through the descriptor: new pages are neither zeroed nor mapped first, and a full /dev/shm is an error
        of the call (`InsufficientMemory`)."""
        done = 0
        with memoryview(data) as view:
            while done < len(view):
                with view[done:] as rest:
                    try:
                        done += os.pwrite(self._fd, rest, offset + done)
                    except OSError as e:
                        raise self._no_room(e) from e
        _kept(self._promise, done)

    def detach(self) -> mmap.mmap:
        """End writing and hand over the mapping, which lives as long as something refers to it."""
        kept = self._map
        self._release()
        return kept

    def close(self, *, unlink: bool = False) -> None:
        if unlink:
            self._unlink()
        kept = self._map
        self._release()
        kept.close()

    def _release(self) -> None:
        _kept(self._promise)
        os.close(self._fd)
        self.memory.release()
        self._anchor = None

    def _unlink(self) -> None:
        if self.name is not None:
            (SHM / self.name).unlink(missing_ok=True)

    def _no_room(self, error: OSError) -> OSError | InsufficientMemory:
        return no_room(self.total_bytes) if error.errno in (errno.ENOSPC, errno.ENOMEM) else error


def _create(name: str | None) -> int:
    if name is None:
        return os.open(SHM, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    return os.open(SHM / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


_lock = threading.Lock()
_promised: dict[object, int] = {}
"""Bytes of the segments being filled that are not allocated yet: two loads may not both count on the same free memory."""


def _promise(total_bytes: int) -> object:
    """A promise of `total_bytes`, unless /dev/shm or the host's memory lacks them beyond what is promised already: `InsufficientMemory`."""
    with _lock:
        needed = total_bytes + sum(_promised.values())
        stat = os.statvfs(SHM)
        if needed > stat.f_bavail * stat.f_frsize or needed > available_memory():
            raise no_room(total_bytes)
        promise = object()
        _promised[promise] = total_bytes
        return promise


def _kept(promise: object, length: int | None = None) -> None:
    """`length` bytes of the promise (None: all) are allocated or no longer wanted."""
    with _lock:
        left = 0 if length is None else _promised.get(promise, 0) - length
        if left > 0:
            _promised[promise] = left
        else:
            _promised.pop(promise, None)


def no_room(total_bytes: int) -> InsufficientMemory:
    stat = os.statvfs(SHM)
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    available = available_memory()
    if total_bytes > size:
        return InsufficientMemory(
            f"the weights need {total_bytes / GIB:.2f} GiB of shared memory and {SHM} holds {size / GIB:.2f} GiB: "
            f"enlarge it (mount -o remount,size=… {SHM}; docker run --shm-size=…) or use a smaller model"
        )
    return InsufficientMemory(
        f"the weights need {total_bytes / GIB:.2f} GiB of shared memory; {SHM} has {free / GIB:.2f} GiB free and the host "
        f"{available / GIB:.2f} GiB: put other models to sleep, lower the devices' budgets, or enlarge {SHM}",
        should_retry=True,
    )


def available_memory() -> int:
    """Bytes the kernel says could be used without swapping (MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def read_segment_header(name: str) -> SegmentHeader | None:
    """The header of an existing segment; None if there is none or it is not whole."""
    try:
        with (SHM / name).open("rb") as file:
            raw = file.read(HEADER_BYTES).rstrip(b"\0")
            size = os.fstat(file.fileno()).st_size
        header = SegmentHeader.model_validate_json(raw)
    except (OSError, ValidationError):
        return None
    whole = header.magic == MAGIC and header.version == LAYOUT_VERSION and header.total_bytes == size
    return header if whole else None


def segments(prefix: str) -> list[str]:
    """Names of the segments of the node that `prefix` belongs to."""
    return sorted(p.name for p in SHM.iterdir() if p.name.startswith(prefix))


def remove_segment(name: str, wait: float = 2.0) -> int:
    """Unlink a segment; bytes proved free: 0 if some process still maps it after `wait` seconds.

    Memory of an unlinked segment lives on until its last mapping goes, so mappings are looked for in /proc/*/maps, and those who have one
    are given `wait` seconds to exit (a killed process takes a moment to let go).
    """
    path = SHM / name
    try:
        stat = path.stat()
        path.unlink()
    except FileNotFoundError:
        return 0
    return min(stat.st_size, stat.st_blocks * 512) if await_unmapped(name, wait) else 0


def await_unmapped(name: str, wait: float = 2.0) -> bool:
    """Whether an unlinked segment is mapped by nobody, now or within `wait` seconds."""
    deadline = time.monotonic() + wait
    while mappers := mapped_by(name):
        left = deadline - time.monotonic()
        if left <= 0:
            log.warning("a removed segment is still mapped", extra={"segment": name, "pids": mappers})
            return False
        _await_exit(mappers, min(left, _RESCAN_S))
    return True


def mapped_by(name: str) -> list[int]:
    """Processes that map the segment, unlinked or not (those that we may look at)."""
    wanted = f"{SHM}/{name}".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (directory / "maps").read_bytes():
                found.append(int(directory.name))
        except OSError:  # it has just ended, or is not ours
            continue
    return found


def _await_exit(pids: list[int], within: float) -> None:
    """Wait until one of `pids` has ended, at most `within` seconds (a process may also unmap and live on: nothing tells of that)."""
    fds: list[int] = []
    try:
        fds.extend(os.pidfd_open(pid) for pid in pids)
        select.select(fds, [], [], within)
    except ProcessLookupError:  # one has ended already
        return
    finally:
        for fd in fds:
            os.close(fd)
