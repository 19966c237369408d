"""Host memory as a device: its budget, and the memory of processes."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable
from pathlib import Path

import psutil

from services.nodeagent.devices.port import DeviceInfo
from shared.control_groups import memory_room

log = logging.getLogger(__name__)


class CpuDevice:
    """A cpu device."""

    def __init__(self, budget_bytes: int, device_id: str = "cpu:0", *, is_separate: bool = False) -> None:
        """Describe the device.

        Args:
            budget_bytes: The limit for all engines of the device together.
            device_id: `cpu:N`.
            is_separate: The device has `budget_bytes` of its own, which weights are copied into.
        """
        total = budget_bytes if is_separate else psutil.virtual_memory().total
        name = platform.processor() or platform.machine()
        self.info = DeviceInfo(device_id, "cpu", name, total, budget_bytes, memory="separate" if is_separate else "unified")
        self._rss_warned = False

    def private_bytes(self, pids: Iterable[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        for pid in pids:
            measured = self._measure(pid)
            if measured is not None:
                found[pid] = measured
        return found

    def used_bytes(self, private_bytes: int, shared_bytes: int) -> int:
        return private_bytes + shared_bytes

    def _measure(self, pid: int) -> int | None:
        try:
            return private_pss(pid)
        except PermissionError:
            if not self._rss_warned:
                self._rss_warned = True
                log.warning(
                    "reading PSS requires ptrace rights; reporting RSS, which counts shared pages in full", extra={"pid": pid}
                )
            return private_rss(pid)


def private_pss(pid: int) -> int | None:
    """Return a process's PSS without shared memory, in bytes; None if the process has no memory.

    Shared memory contains the weights, which are counted once for all engines.

    Raises:
        PermissionError: This process may not ptrace the other one.
    """
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    values = {k: int(v.split()[0]) * 1024 for k, _, v in (line.partition(":") for line in rollup.splitlines()[1:]) if v}
    return max(0, values.get("Pss", 0) - values.get("Pss_Shmem", 0)) if values else None


def private_rss(pid: int) -> int | None:
    """Return the resident anonymous and file pages in bytes; None if the process has no memory."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    values = {k: v for k, _, v in (line.partition(":") for line in status.splitlines())}
    if "RssAnon" not in values:
        return None
    return sum(int(values[k].split()[0]) * 1024 for k in ("RssAnon", "RssFile") if k in values)


def available_bytes() -> int:
    """Return the host memory in bytes that is available without swapping.

    The limits of this process's control group apply.
    """
    free = psutil.virtual_memory().available
    room = memory_room()
    return free if room is None else min(free, room)


def oom_kills() -> int | None:
    """Return the number of OOM kills by the kernel since boot; None if unknown."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None
