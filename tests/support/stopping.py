"""Stop processes, as SIGSTOP does, and wait until they no longer run.

The signal takes effect later on a busy machine: until then the process still answers.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_WITHIN_S = 60.0


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
