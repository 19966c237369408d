"""Touch this machine's free memory once, and give it back: `python -m weights.pool.pretouch FILE`.

A host that backs memory at its first touch has then backed it, and later loads wait for no host
(ADR 0059). The memory has to be held until all of it is touched: the kernel hands out pages that
were just freed first. The process therefore is the first that the kernel would kill for want of
memory, runs only when no other process wants the core (SCHED_IDLE), ends with its parent, and can
be killed at any time.

It prints a line of JSON for every `STEP_BYTES`, and writes the boot's id to FILE when it has
touched all. One process works per FILE at a time.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weights.pool.host_backing import free_memory, host, memory_pressure
from weights.pool.shm import available_memory, physical_memory

STEP_BYTES = 64 * 1024 * 1024
RESERVED_SHARE = 0.1
"""Share of the memory that stays available to other processes."""
FREE_SHARE = 0.02
"""Share of the memory that stays free, so that the page cache is not evicted."""
MOST_PRESSURE = 5.0
"""Percent of time in which tasks wait for memory, from which on touching stops."""
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MAP_NORESERVE = 0x4000
_PR_SET_PDEATHSIG = 1

Verdict = Literal["continue", "complete", "pressure"]


@dataclass(frozen=True)
class Memory:
    """Memory of this machine, in bytes.

    Attributes:
        pressure: Percent of time in which a task waited for memory; None: not known.
    """

    total: int
    available: int
    free: int
    pressure: float | None = None


def judge(memory: Memory, step: int = STEP_BYTES) -> Verdict:
    """Return whether to touch `step` more bytes.

    1. tasks wait for memory → pressure;
    2. what other processes may need would be less than their share → complete;
    3. the page cache would be evicted → complete.
    """
    if memory.pressure is not None and memory.pressure > MOST_PRESSURE:  # 1
        return "pressure"
    if memory.available - step < memory.total * RESERVED_SHARE:  # 2
        return "complete"
    if memory.free - step < memory.total * FREE_SHARE:  # 3
        return "complete"
    return "continue"


def touch(read: Callable[[], Memory], most: int | None = None) -> Iterator[tuple[int, Verdict]]:
    """Touch memory step by step; yield the bytes touched so far and the verdict after each step.

    Args:
        most: Bytes to touch at most.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    held: list[mmap.mmap] = []
    verdict = judge(read())
    while verdict == "continue" and (most is None or len(held) * STEP_BYTES < most):
        area = mmap.mmap(-1, STEP_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        anchor = ctypes.c_char.from_buffer(area)
        address = ctypes.addressof(anchor)
        del anchor
        libc.madvise(address, STEP_BYTES, _MADV_HUGEPAGE)
        if libc.madvise(address, STEP_BYTES, _MADV_POPULATE_WRITE):  # a kernel without it
            area[:: mmap.PAGESIZE] = bytes(STEP_BYTES // mmap.PAGESIZE)
        held.append(area)
        verdict = judge(read())
        yield len(held) * STEP_BYTES, verdict
    if not held or verdict == "continue":
        yield len(held) * STEP_BYTES, "complete" if verdict == "continue" else verdict


def _read() -> Memory:
    return Memory(physical_memory(), available_memory(), free_memory(), memory_pressure())


def _step_back() -> None:
    """Lower this process's claims: on cores, on memory, and on life."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main(arguments: list[str] | None = None) -> int:
    parent = os.getppid()
    path, *most = arguments if arguments is not None else sys.argv[1:]
    _step_back()
    if os.getppid() != parent:  # the parent ended before prctl
        return 1
    with Path(path).open("a+") as marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return 0
        touched, verdict = 0, "complete"
        for touched, verdict in touch(_read, int(most[0]) if most else None):
            sys.stdout.write(json.dumps({"touched_bytes": touched, "verdict": verdict}) + "\n")
            sys.stdout.flush()
        if verdict == "complete":
            marker.truncate(0)
            marker.write(host().boot_id)
    return 0


if __name__ == "__main__":
    sys.exit(main())
