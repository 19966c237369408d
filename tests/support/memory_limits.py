"""Control groups with memory limits, as files of a test."""

from __future__ import annotations

from pathlib import Path

from shared.control_groups import memory_limit, memory_room

MB = 1_000_000
NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


class Groups:
    """Control groups as the kernel shows them.

    Attributes:
        sys: /sys/fs/cgroup.
        own: /proc/self/cgroup.
    """

    def __init__(self, root: Path, version: int) -> None:
        self.sys, self.own, self._version = root / "cgroup", root / "own", version
        self.root = self.sys / "memory" if version == 1 else self.sys
        self.root.mkdir(parents=True)

    def enter(self, path: str) -> None:
        self.own.write_text(f"3:cpu,memory:{path}\n0::/\n" if self._version == 1 else f"0::{path}\n")

    def make(self, path: str, limit: str, used: int = 0, files: int = 0) -> None:
        group = self.root / path
        group.mkdir(parents=True, exist_ok=True)
        most, now, prefix = NAMES[self._version]
        (group / most).write_text(f"{limit}\n")
        (group / now).write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"shmem 5\n{prefix}inactive_file {files - 1}\n{prefix}active_file 1\n")

    def limits(self) -> tuple[int | None, int | None]:
        return memory_limit(self.sys, self.own), memory_room(self.sys, self.own)
