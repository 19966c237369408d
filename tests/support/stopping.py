"""Stop processes, as SIGSTOP does, and wait until they no longer run; end those of a failed test.

The signal takes effect later on a busy machine: until then the process still answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

_WITHIN_S = 60.0
_Process = TypeVar("_Process", bound=subprocess.Popen[Any])


@contextlib.contextmanager
def killed_at_exit(process: _Process) -> Iterator[_Process]:
    """Kill the process at the end of the block.

    `with Popen(...)` alone waits until the process ends by itself: a failed test would hang.
    """
    with process:
        try:
            yield process
        finally:
            process.kill()


def stop(*pids: int) -> None:
    """Stop processes, with all their threads; SIGCONT resumes them.

    Raises:
        ProcessLookupError: A process does not exist.
        TimeoutError: A thread still runs after half a minute.
    """
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _WITHIN_S
    while running := [pid for pid in pids if not _is_stopped(pid)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {running} were sent SIGSTOP and still run")
        time.sleep(0.002)


def _is_stopped(pid: int) -> bool:
    """True if no thread of the process can run; also if it has ended."""
    try:
        return all(_state(task) in "TtZX" for task in Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return True


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
