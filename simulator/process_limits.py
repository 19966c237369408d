"""Limits of a simulation's process that another process started for a client."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
from pathlib import Path

_NICENESS = 19
_RESERVE_BYTES = 64 << 20
"""Address space with which the process reports that the rest is used up."""


def apply_limits(cpu_s: int, memory_bytes: int) -> None:
    """Limit this process, and end it when its standard input ends.

    The starting process keeps the other end of the pipe, so that the simulation ends with it.

    Args:
        cpu_s: Seconds of processor time; the kernel ends the process (SIGXCPU) beyond them.
        memory_bytes: Address space; beyond it allocations raise `MemoryError`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent by a terminal; the starting process ends this one
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):  # no such file on other systems
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes + _RESERVE_BYTES))
    threading.Thread(target=_end_with_input, name="input", daemon=True).start()


def open_reserve() -> None:
    """Allow the memory that it takes to report an error, after allocations have failed."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _end_with_input() -> None:
    """Wait for the end of standard input."""
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    os._exit(1)
