"""Processes by what cannot be mistaken: a pid together with its start time."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

_LINUX = sys.platform.startswith("linux")


@dataclass(frozen=True)
class Identity:
    """Identity of a process: its pid and start time (of the kernel's clock).

    A pid alone is reused.
    """

    pid: int
    started: float

    def is_alive(self) -> bool:
        return start_time(self.pid) == self.started and not _is_zombie(self.pid)

    def send(self, signum: int, *, group: bool = False) -> None:
        """Signal the process, or the group it leads; harmless if it is gone."""
        if not self.is_alive():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group and os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, signum)
            else:
                os.kill(self.pid, signum)


def start_time(pid: int) -> float | None:
    """Return the start time of `pid`; None without such a process.

    It is in clock ticks since boot on Linux (immune to the wall clock being set), and in Unix
    seconds elsewhere.
    """
    if _LINUX:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        return float(stat.rpartition(")")[2].split()[19])
    import psutil  # slow to import, and not needed on Linux

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def identify(pid: int) -> Identity | None:
    started = start_time(pid)
    return None if started is None else Identity(pid=pid, started=started)


def _is_zombie(pid: int) -> bool:
    if _LINUX:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "Z"
    import psutil

    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
