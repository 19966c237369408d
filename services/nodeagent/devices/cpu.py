"""Host memory as a device: a budget of it, and what processes hold of it."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable
from pathlib import Path

import psutil

from services.nodeagent.devices.port import DeviceInfo

log = logging.getLogger(__name__)
_V2 = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


class CpuDevice:
    """`cpu:0`. `info.budget_bytes` is what engines may hold together."""

    def __init__(self, budget_bytes: int) -> None:
        self.info = DeviceInfo(
            "cpu:0", "cpu", platform.processor() or platform.machine(), psutil.virtual_memory().total, budget_bytes
        )
        self._rss_told = False

    def private_bytes(self, pids: Iterable[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        for pid in pids:
            measured = self._measure(pid)
            if measured is not None:
                found[pid] = measured
        return found

    def used_bytes(self, private: int, shared: int) -> int:
        return private + shared

    def _measure(self, pid: int) -> int | None:
        try:
            return private_pss(pid)
        except PermissionError:
            if not self._rss_told:
                self._rss_told = True
                log.warning(
                    "reading PSS needs ptrace rights; memory is told as RSS, which counts shared pages in full", extra={"pid": pid}
                )
            return private_rss(pid)


def private_pss(pid: int) -> int | None:
    """The process's proportional share of its pages in bytes, shared memory (weight segments) left out; None if it has none (any more).

    Needs the right to ptrace the process: raises `PermissionError` without.
    """
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    values = {k: int(v.split()[0]) * 1024 for k, _, v in (line.partition(":") for line in rollup.splitlines()[1:]) if v}
    return max(0, values.get("Pss", 0) - values.get("Pss_Shmem", 0)) if values else None


def private_rss(pid: int) -> int | None:
    """Resident anonymous and file pages in bytes; None if the process has none (any more)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    values = {k: v for k, _, v in (line.partition(":") for line in status.splitlines())}
    if "RssAnon" not in values:
        return None
    return sum(int(values[k].split()[0]) * 1024 for k in ("RssAnon", "RssFile") if k in values)


def available_bytes() -> int:
    """Host memory that can be had without swapping, within this process's memory cgroup."""
    free = psutil.virtual_memory().available
    room = _cgroup_room()
    return free if room is None else min(free, room)


def _cgroup_room() -> int | None:
    paths = dict(_cgroups())
    if "memory" in paths:
        root = Path("/sys/fs/cgroup/memory")
        limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        candidates = (root / paths["memory"].lstrip("/"), root)
    else:
        limit, used = "memory.max", "memory.current"
        candidates = (_V2 / paths.get("", "/").lstrip("/"), _V2)
    for directory in candidates:
        try:
            text = (directory / limit).read_text().strip()
            if text == "max" or int(text) >= _UNLIMITED:
                return None
            return max(0, int(text) - int((directory / used).read_text()))
        except (OSError, ValueError):
            continue
    return None


def _cgroups() -> Iterable[tuple[str, str]]:
    """(controller, path) of this process; the unified hierarchy's controller is empty."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def oom_kills() -> int | None:
    """How often the kernel's out-of-memory killer has struck on this machine since boot; None where the kernel does not say."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None
