"""Memory limits of this process's control group.

A process that exceeds them is killed; its allocations do not fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SYS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 reports a number a little below 2^63 for a group without a limit."""


@dataclass(frozen=True)
class _Version:
    limit: str
    used: str
    files: frozenset[str]
    """Lines of memory.stat that count the page cache, which the kernel reclaims on demand.

    Shared memory is not among them.
    """


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", frozenset({"total_active_file", "total_inactive_file"}))
_V2 = _Version("memory.max", "memory.current", frozenset({"active_file", "inactive_file"}))


def memory_limit(sys: Path = _SYS, own: Path = _OWN) -> int | None:
    """Return this control group's memory limit in bytes; None without a limit."""
    return min((limit for _, _, limit in _limited_groups(sys, own)), default=None)


def memory_room(sys: Path = _SYS, own: Path = _OWN) -> int | None:
    """Return the bytes that may still be used within the limits; None without a limit."""
    return min(
        (max(0, limit - _unreclaimable_bytes(group, version)) for group, version, limit in _limited_groups(sys, own)), default=None
    )


def _limited_groups(sys: Path, own: Path) -> Iterator[tuple[Path, _Version, int]]:
    """Yield this process's group and its ancestors, as far as they have a limit.

    In a container the path may be the host's, and the container's own group is the root.
    """
    paths = dict(_paths(own))
    version, root, path = (_V1, sys / "memory", paths["memory"]) if "memory" in paths else (_V2, sys, paths.get("", "/"))
    group = root / path.lstrip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(root):
            return
        try:
            limit = int((directory / version.limit).read_text())
        except (OSError, ValueError):  # not here; or "max"
            continue
        if limit < _UNLIMITED:
            yield directory, version, limit


def _paths(own: Path) -> Iterator[tuple[str, str]]:
    """Yield (controller, path); the controller of version 2 is an empty string."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _unreclaimable_bytes(group: Path, version: _Version) -> int:
    """Return the bytes in use that cannot be reclaimed."""
    try:
        used = int((group / version.used).read_text())
        lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        return used - sum(int(value) for name, value in lines if name in version.files)
    except (OSError, ValueError):
        return 0
