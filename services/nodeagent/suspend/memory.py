"""Process memory as the kernel counts it, and `process_madvise`."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.errors import EngineFailed, PermissionDenied

PROCESS_MADVISE = 440
MADV_WILLNEED = 3
MADV_PAGEOUT = 21
_BATCH = 512
_PASSES = 3
_FEW_LEFT = 0.1
"""A page that is in transit when advised (in a pagevec, under writeback) needs another pass, if
many remain.
"""
_STEP = 64 * 1024 * 1024
"""Mappings are advised in steps of this size, so that a failure affects only a part."""
_UNTOUCHABLE = ("[vvar]", "[vdso]", "[vsyscall]", "[vvar_vclock]", "[uprobes]")
_PRESENT = re.compile(rb"[\x80-\xff]+(?:[\x00-\x7f]{1,7}[\x80-\xff]+)*")
"""Runs of present pages. A gap shorter than the eight pages that a fault reads is included."""
_libc = ctypes.CDLL(None, use_errno=True)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True)
class Footprint:
    """Memory of some processes together, in bytes.

    Args:
        pss: Resident memory; a page shared by n processes counts 1/n.
        swap: Memory in swap.
    """

    pss: int = 0
    swap: int = 0


def footprint(pids: Iterable[int]) -> Footprint:
    """Memory of the processes that exist (`smaps_rollup`).

    Raises `PermissionDenied` without the right to ptrace them.
    """
    pss = swap = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError as e:
            raise PermissionDenied("Reading an engine's memory (smaps_rollup) needs CAP_SYS_PTRACE") from e
        values = {k: int(v.split()[0]) * 1024 for k, _, v in (line.partition(":") for line in text.splitlines()[1:]) if v}
        pss += values.get("Pss", 0)
        swap += values.get("Swap", 0)
    return Footprint(pss, swap)


def mappings(pid: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of every mapping whose pages can be moved."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) > 5 and fields[5] in _UNTOUCHABLE:
            continue
        start, end = (int(a, 16) for a in fields[0].split("-"))
        if fields[1].startswith("---"):
            continue
        yield start, end - start


def find_resident(pid: int) -> list[tuple[int, int]]:
    """(start, length) of a process's resident memory, including gaps of a few pages.

    Uses `pagemap`: a page that the process has touched is in its page table. Raises
    `PermissionDenied` without the right to ptrace it.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    found: list[tuple[int, int]] = []
    try:
        with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as file:
            for start, length in mappings(pid):
                for offset in range(0, length, _STEP):
                    entries = os.pread(file.fileno(), min(_STEP, length - offset) // page * 8, (start + offset) // page * 8)
                    # The highest bit of an entry's last byte: present.
                    runs = _PRESENT.finditer(entries[7::8])
                    found += [(start + offset + m.start() * page, (m.end() - m.start()) * page) for m in runs]
    except PermissionError as e:
        raise PermissionDenied("Reading an engine's page table (pagemap) needs CAP_SYS_PTRACE") from e
    return found


def advise(pid: int, ranges: Iterable[tuple[int, int]], advice: int) -> int:
    """Advise the kernel about `ranges` of another process, in batches.

    Ranges that do not allow the advice (locked, huge or device pages) are skipped.

    Returns:
        Bytes that the kernel accepted.

    Raises:
        PermissionDenied: This process lacks CAP_SYS_NICE.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0
    try:
        pieces = list(_pieces(ranges))
        return sum(_advise(descriptor, pieces[i : i + _BATCH], advice) for i in range(0, len(pieces), _BATCH))
    finally:
        os.close(descriptor)


def page_out(pids: Iterable[int], whole: int) -> Footprint:
    """Page frozen processes out to swap, and return their remaining memory.

    Args:
        pids: The processes.
        whole: Their memory before, in bytes.
    """
    known = tuple(pids)
    found = Footprint()
    for _ in range(_PASSES):
        for pid in known:
            try:
                advise(pid, mappings(pid), MADV_PAGEOUT)
            except (FileNotFoundError, ProcessLookupError):
                continue
        found = footprint(known)
        if found.pss <= _FEW_LEFT * whole:
            break
    return found


def page_in(pids: Iterable[int]) -> None:
    """Prefetch everything that the processes have in swap."""
    for pid in pids:
        try:
            advise(pid, mappings(pid), MADV_WILLNEED)
        except (FileNotFoundError, ProcessLookupError):
            continue


def _pieces(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for start, length in ranges:
        for offset in range(0, length, _STEP):
            yield start + offset, min(_STEP, length - offset)


def _advise(descriptor: int, pieces: list[tuple[int, int]], advice: int) -> int:
    """Advise all pieces in one call.

    Where the kernel stops early, it continues after that piece.
    """
    total = 0
    while pieces:
        vector = (_Iovec * len(pieces))(*(_Iovec(start, length) for start, length in pieces))
        taken = int(_libc.syscall(PROCESS_MADVISE, descriptor, vector, ctypes.c_size_t(len(pieces)), advice, 0))
        if taken < 0:
            code = ctypes.get_errno()
            if code == errno.ESRCH:
                return total
            if code == errno.EPERM:
                raise PermissionDenied("process_madvise needs CAP_SYS_NICE and the right to ptrace the engine (CAP_SYS_PTRACE)")
            if code == errno.ENOSYS:
                raise EngineFailed("This kernel has no process_madvise (Linux 5.10 or later is needed)")
            if code == errno.EINTR:
                continue
            pieces = pieces[1:]
            continue
        total += taken
        while pieces and taken >= pieces[0][1]:
            taken -= pieces[0][1]
            pieces = pieces[1:]
        pieces = pieces[1:]
    return total


@dataclass(frozen=True)
class Swap:
    """Swap space of this machine in bytes."""

    total: int
    free: int


def swap_space() -> Swap:
    values: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            values[key] = int(value.split()[0]) * 1024
    return Swap(values.get("SwapTotal", 0), values.get("SwapFree", 0))


CAP_SYS_PTRACE, CAP_SYS_NICE = 19, 23


def has_capability(number: int) -> bool:
    """True if this process has the capability in effect."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> number & 1)
    return False
