"""Shared memory of killed Python engines, which cannot unlink it.

The host's reaper (services/enginehost/runtimes/reaper.py) does the same. When the nodeagent kills
host and engine together, the reaper starts too late to see which segments the engine had mapped.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Set
from pathlib import Path

from shared.processes import all_pids

_DIRECTORY = Path("/dev/shm")
_NAMES = ("psm_*", "sem.mp-*", "vllm_dist_*")
"""Shared memory and semaphores of Python's multiprocessing, and shared memory of vLLM's cpu
workers.
"""
_MAPPED = ("/dev/shm/psm_", "/dev/shm/sem.", "/dev/shm/vllm_dist_")
"""Names that the kernel shows: a semaphore by the temporary name under which the C library created
it.
"""


def find_mapped_inodes(pid: int) -> set[int]:
    """Inodes of such segments of this machine's that a process has mapped.

    A container has a file system of its own at the same path, where other files have these numbers.
    """
    found = set()
    with contextlib.suppress(OSError):
        device = _DIRECTORY.stat().st_dev
        number = f"{os.major(device):02x}:{os.minor(device):02x}"
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) > 5 and fields[3] == number and fields[5].startswith(_MAPPED):
                found.add(int(fields[4]))
    return found


def remove(left: Set[int]) -> None:
    """Unlink those of these segments that no process maps any more.

    Reads the maps of every process.
    """
    if not left:
        return
    unused = left - {inode for pid in all_pids() for inode in find_mapped_inodes(pid)}
    for path in (p for name in _NAMES for p in _DIRECTORY.glob(name)):
        with contextlib.suppress(OSError):
            if path.stat().st_ino in unused:
                path.unlink()
