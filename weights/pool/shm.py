"""Shared memory of this host: its size, and Thaw's files in it."""

from __future__ import annotations

import os
from pathlib import Path

from shared.control_groups import memory_limit, memory_room
from shared.errors import InsufficientMemory

SHM = Path("/dev/shm")
GIB = 1 << 30
DRAM_SHARE = 0.15
READY_SHARE = 1 / 3
LEAST_AVAILABLE = 0.02
"""Share of the host's memory below which cached weights are evicted."""


def free_bytes() -> int:
    """Return the bytes of shared memory available now."""
    stat = os.statvfs(SHM)
    return min(stat.f_bavail * stat.f_frsize, available_memory())


def default_dram_bytes() -> int:
    """Return the default budget of the DRAM cache in bytes.

    It leaves memory for everything else beside a CPU device's default share.
    """
    stat = os.statvfs(SHM)
    return min(int(available_memory() * DRAM_SHARE), stat.f_blocks * stat.f_frsize // 2)


def default_ready_bytes(dram_bytes: int, *, with_gpu: bool, takes_back: bool = False) -> int:
    """Return how much of the DRAM cache's budget to populate before a load needs it.

    On a node with GPUs that is the whole budget, because weights only pass through. It is a part of
    the budget where engines compute in the same memory.

    Args:
        takes_back: The host takes free memory back, and fresh memory is slow: the whole budget.
    """
    return dram_bytes if with_gpu or takes_back else int(dram_bytes * READY_SHARE)


def short_of_memory() -> int:
    """Return the bytes that the host is short of; 0 or less if none."""
    return int(physical_memory() * LEAST_AVAILABLE) - available_memory()


def no_room(total_bytes: int) -> InsufficientMemory:
    stat = os.statvfs(SHM)
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    available, limit = available_memory(), memory_limit()
    if limit is not None and total_bytes > limit:
        return InsufficientMemory(
            f"The weights need {total_bytes / GIB:.2f} GiB of memory and this process's control group (container, service) may "
            f"have {limit / GIB:.2f} GiB: raise its memory limit or use a smaller model"
        )
    if total_bytes > size:
        return InsufficientMemory(
            f"The weights need {total_bytes / GIB:.2f} GiB of shared memory and {SHM} holds {size / GIB:.2f} GiB: "
            f"enlarge it (mount -o remount,size=… {SHM}; docker run --shm-size=…) or use a smaller model"
        )
    whose = "the host" if limit is None else "this control group"
    return InsufficientMemory(
        f"The weights need {total_bytes / GIB:.2f} GiB of shared memory; {SHM} has {free / GIB:.2f} GiB free and {whose} "
        f"{available / GIB:.2f} GiB: put other models to sleep, lower the devices' budgets, or enlarge {SHM}",
        should_retry=True,
    )


def available_memory() -> int:
    """Return the bytes of memory that can be used without swapping (MemAvailable).

    The limits of this process's control group apply.
    """
    room = memory_room()
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            return available if room is None else min(available, room)
    return 1 << 62 if room is None else room


def physical_memory() -> int:
    """Return the bytes of this host's memory, within this control group's limit."""
    memory, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_limit()
    return memory if limit is None else min(memory, limit)


def segments(prefix: str) -> list[str]:
    """Names of the segments of the node that `prefix` belongs to."""
    return sorted(p.name for p in SHM.iterdir() if p.name.startswith(prefix))
