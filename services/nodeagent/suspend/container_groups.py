"""Control groups of cgroup v2 that a container engine has made for containers."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from pathlib import Path

GONE = (errno.ENOENT, errno.ENODEV)
"""Errors of the files of a group that has been removed."""


def find_container_group(pids: Collection[int], mount: Path, root: str) -> Path | None:
    """Find the deepest group that has all processes of a container.

    Args:
        pids: Processes of one container.
        mount: Mount point of cgroup v2.
        root: The directory of the hierarchy that is mounted there.

    Returns:
        The group's directory, which does not exist if it is not visible here. None if the processes
        have ended, or their container engine left them in the hierarchy's root.
    """
    paths = [path for pid in pids if (path := _group_path(pid)) is not None]
    if all(path == "/" for path in paths):
        return None
    return Path(os.path.commonpath([f"{mount}/{path.removeprefix(root.rstrip('/')).lstrip('/')}" for path in paths]))


def can_freeze(group: Path, pids: Collection[int]) -> bool:
    """True if this process may freeze the group, and it has processes of that container only.

    A container engine without control groups leaves containers in its own group, with itself.
    """
    try:
        container = {found for pid in pids if (found := _pid_namespace(pid)) is not None}
        inside = {found for pid in list_processes(group) if (found := _pid_namespace(pid)) is not None}
        own = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return False
    return len(container) == 1 and inside == container and own not in container and os.access(group / "cgroup.freeze", os.W_OK)


def list_processes(group: Path) -> tuple[int, ...]:
    """Return the processes of a group, if it exists, and of the groups below it."""
    return tuple(sorted(pid for directory, _, _ in os.walk(group) for pid in _read_pids(Path(directory, "cgroup.procs"))))


def _read_pids(file: Path) -> Iterator[int]:
    try:
        yield from map(int, file.read_text().split())
    except OSError as e:
        if e.errno not in GONE:
            raise


def _group_path(pid: int) -> str | None:
    """Return the process's path in cgroup v2; None if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)


def _pid_namespace(pid: int) -> int | None:
    """Return the process's pid namespace; None if the process has ended.

    Raises:
        OSError: This process may not read it.
    """
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except (FileNotFoundError, ProcessLookupError):
        return None
