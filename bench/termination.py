"""End a benchmark on SIGTERM as on an error, so that it ends the processes that it has started."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

STATUS = 128 + signal.SIGTERM


def end_on_sigterm() -> None:
    """Let SIGTERM raise `SystemExit` in the main thread of this process.

    `timeout` sends the signal to the process and then to its group. Only the first one counts: a
    second one would interrupt the end of the mesh.
    """
    own, is_ending = os.getpid(), False

    def end(number: int, _: FrameType | None) -> None:
        nonlocal is_ending
        if os.getpid() != own:  # a fork, which has nothing to end
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not is_ending:
            is_ending = True
            sys.exit(STATUS)

    signal.signal(signal.SIGTERM, end)
