"""Threads that nobody waits for."""

from __future__ import annotations

import contextlib
import os
import threading

_NICENESS = 10


def step_back() -> None:
    """Have this thread yield to those that load: on Linux niceness is a thread's own."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
