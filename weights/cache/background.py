"""Threads of low priority."""

from __future__ import annotations

import contextlib
import os
import threading

_NICENESS = 10


def lower_thread_priority() -> None:
    """Lower this thread's priority below the loading threads.

    On Linux each thread has its own niceness.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
