"""Engine processes as the kernel knows them: a pid and a start time name one for good, a pidfd tells its end at once."""

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
    """When the process started, in clock ticks since boot (field 22 of /proc/<pid>/stat); None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def find_writer(log_path: Path) -> int | None:
    """The process that has `log_path` as its standard error: an engine whose pid nobody wrote down. None if there is none. A hosted engine
    writes there too: the host is the one that came first."""
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
    """The engine processes that this agent watches, its own children or not. `on_exit(instance_id, pid)` is called at each one's end."""

    def __init__(self, on_exit: Callable[[str, int], None]) -> None:
        self._on_exit = on_exit
        self._watched: dict[str, tuple[int, int]] = {}

    def watch(self, instance_id: str, pid: int, started: int | None = None) -> int | None:
        """Watch `pid`; returns its start time, or None if it is gone already, or is another process than the one that `started` then."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        actual = process_start(pid)
        if actual is None or (started is not None and actual != started):
            os.close(descriptor)
            return None
        self._watched[instance_id] = (pid, descriptor)
        asyncio.get_running_loop().add_reader(descriptor, self._gone, instance_id)
        return actual

    def send(self, instance_id: str, what: Literal["term", "kill"]) -> None:
        """Signal that very process, never one that came to have its pid later."""
        if instance_id in self._watched:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._watched[instance_id][1], _SIGNALS[what])

    def close(self) -> None:
        """Stop watching; the processes go on."""
        for instance_id in list(self._watched):
            self._unwatch(instance_id)

    def _gone(self, instance_id: str) -> None:
        pid = self._unwatch(instance_id)
        self._on_exit(instance_id, pid)

    def _unwatch(self, instance_id: str) -> int:
        pid, descriptor = self._watched.pop(instance_id)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        return pid
