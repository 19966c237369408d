"""Find and end the processes that an instance's engine has forked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

MARK_VARIABLE = "THAW_INSTANCE"
"""Environment variable of an engine's processes, which also identifies orphans."""
_POLL_S = 0.01


def all_pids() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            yield int(entry.name)


def mark_of(scope: str, instance_id: str) -> str:
    """Return the mark of an instance's processes.

    Args:
        scope: Scope of the node (`NodeSettings.scope`).
        instance_id: The instance.
    """
    return f"{scope}.{instance_id}"


def find_marked(mark: str) -> set[int]:
    """Processes that carry an instance's mark, zombies left out.

    Reads every process's environment: some milliseconds.
    """
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = set()
    for pid in all_pids():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def descendants(pid: int) -> list[int]:
    """`pid`, its children, theirs and so on, zombies included; parents first."""
    found = [pid]
    for parent in found:
        found += _children(parent)
    return found


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                yield from map(int, (task / "children").read_text().split())


async def process_end(pid: int) -> None:
    """Wait until the process is gone, whosever child it is."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def end_all(pids: Callable[[], Iterable[int]], within_s: float = 5.0) -> bool:
    """Send SIGKILL to the processes that `pids()` finds until none is left.

    Returns:
        False if a process is left after `within_s` seconds.
    """
    deadline = time.monotonic() + within_s
    while found := [p for p in pids() if _is_alive(p)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def end_marked(mark: str) -> bool:
    """End all remaining processes of an instance's engine; False if one survives."""
    return end_all(lambda: find_marked(mark))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
