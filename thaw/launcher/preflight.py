"""Check that the machine has enough resources, for `thaw up` and `thaw doctor`."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from shared.control_groups import memory_room
from thaw.errors import CommandError
from thaw.launcher.leftovers import SHM
from thaw.units import format_size

SERVICES_BYTES = 640 * 1024 * 1024
"""Memory of NATS, PostgreSQL and the services of one node together, without any model (577 MiB of
PSS measured after a start, 333 of them the zygote with its imports).
"""


def available_memory() -> int:
    """Return the available memory in bytes, bounded by this process's control group."""
    available, room = int(psutil.virtual_memory().available), memory_room()
    return available if room is None else min(available, room)


def free_shared_memory() -> int | None:
    """Bytes free under /dev/shm; None where there is none."""
    return shutil.disk_usage(SHM).free if SHM.is_dir() else None


def free_disk(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def check_room(home: Path, *, memory: int, shared: int, disk: int, purpose: str) -> None:
    """Check memory, shared memory and disk for `purpose`.

    Raises:
        CommandError: The first of them that is too small.
    """
    has = available_memory()
    if has < memory:
        raise CommandError(
            f"{purpose} needs {format_size(memory)} of memory; {format_size(has)} are available.",
            "Stop other programs or use a machine with more memory; `thaw up` without --demo needs less.",
            code="too_little_memory",
        )
    shm = free_shared_memory()
    if shm is None or shm < shared:
        raise CommandError(
            f"{purpose} needs {format_size(shared)} under {SHM}; {format_size(shm or 0)} are free.",
            f"Enlarge it: `mount -o remount,size=4G {SHM}`, or `--shm-size=4g` for a container.",
            code="too_little_shared_memory",
        )
    room = free_disk(home)
    if room < disk:
        raise CommandError(
            f"{purpose} needs {format_size(disk)} of disk under {home}; {format_size(room)} are free.",
            "Free some, or set THAW_HOME to a directory on another disk.",
            code="too_little_disk",
        )
