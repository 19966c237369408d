"""Engine processes in the kernel.

Pid and start time identify one uniquely, and a pidfd signals its exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Literal

_SIGNALS = {"term": signal.SIGTERM, "kill": signal.SIGKILL}


def process_start(pid: int) -> int | None:
    """Start time in clock ticks since boot; None if it has exited.

    Field 22 of /proc/<pid>/stat.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the process name before it may contain any character
    return None if fields[0] in "ZX" else int(fields[19])


def find_log_writer(log_path: Path) -> int | None:
    """The process whose standard error is `log_path`; None if there is none.

    It is an engine whose pid was not recorded.

    A hosted engine writes to the same log; the host is the one that started first.
    """
    try:
        wanted = log_path.stat()
    except OSError:
        return None
    writers: list[tuple[int, int]] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            found = (entry / "fd" / "2").stat()
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                started = process_start(int(entry.name))
                if started is not None:
                    writers.append((started, int(entry.name)))
    return min(writers)[1] if writers else None


class Processes:
    """Watches engine processes, whether children of this agent or not.

    `on_exit(instance_id, pid)` is called at the exit of each.
    """

    def __init__(self, on_exit: Callable[[str, int], None]) -> None:
        self._on_exit = on_exit
        self._watched: dict[str, tuple[int, int]] = {}

    def watch(self, instance_id: str, pid: int, started: int | None = None) -> int | None:
        """Watch `pid`.

        Args:
            instance_id: The instance that it belongs to.
            pid: The process.
            started: Its expected start time, if known.

        Returns:
            Its start time; None if it has exited, or another process has its pid.
        """
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        actual = process_start(pid)
        if actual is None or (started is not None and actual != started):
            os.close(descriptor)
            return None
        self._watched[instance_id] = (pid, descriptor)
        asyncio.get_running_loop().add_reader(descriptor, self._on_gone, instance_id)
        return actual

    def hand_over(self, old: str, new: str) -> bool:
        """Report the exit of `old`'s process as that of `new` from now on.

        False: it has exited, and that was reported already.
        """
        if old not in self._watched:
            return False
        descriptor = self._watched.pop(old)
        self._watched[new] = descriptor
        loop = asyncio.get_running_loop()
        loop.remove_reader(descriptor[1])
        loop.add_reader(descriptor[1], self._on_gone, new)
        return True

    def send(self, instance_id: str, what: Literal["term", "kill"]) -> None:
        """Signal the watched process, never a later one with the same pid."""
        if instance_id in self._watched:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._watched[instance_id][1], _SIGNALS[what])

    def unwatch(self, instance_id: str) -> None:
        """Stop watching the instance's process, which keeps running."""
        if instance_id in self._watched:
            self._unwatch(instance_id)

    def close(self) -> None:
        """Stop watching. The processes keep running."""
        for instance_id in list(self._watched):
            self._unwatch(instance_id)

    def _on_gone(self, instance_id: str) -> None:
        pid = self._unwatch(instance_id)
        self._on_exit(instance_id, pid)

    def _unwatch(self, instance_id: str) -> int:
        pid, descriptor = self._watched.pop(instance_id)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        return pid
