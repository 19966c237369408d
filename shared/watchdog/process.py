"""Read the state of a process's main thread, and its wait for a processor."""

from __future__ import annotations

from pathlib import Path


def state_of(pid: int) -> str:
    """Return the state letter of /proc/PID/stat.

    It is "X" for a process that is gone, and "S" where there is no /proc.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X" if Path("/proc/self/stat").exists() else "S"


def cpu_wait_s(pid: int) -> float:
    """Return the seconds that the thread was runnable without running.

    0 where the kernel keeps no such account.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
