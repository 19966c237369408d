"""pytest-xdist's workers, forked from a process that has collected the tests once.

Each worker of pytest-xdist collects all tests; three quarters of the CPU time are imports, which a
fork of a process that has collected them already has. `install` makes pytest-xdist start
`python -m tests.support.worker`, and `tests.support.forking` forks that from the server
(`tests.support.worker_server`). Where a system has no fork server, it is executed and imports all
by itself.
"""

from __future__ import annotations

import sys
from types import ModuleType

from execnet import gateway_io

MODULE = "tests.support.worker"


def install() -> None:
    """Make pytest-xdist start this module."""
    gateway_io.popen_args = lambda spec: [sys.executable, "-m", MODULE]


def serve() -> None:
    """Execute the statements that the controller sends, as the command of execnet does."""
    # Processes of `multiprocessing` import the main module again: it is none of ours.
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(eval(sys.stdin.readline()), main.__dict__)


if __name__ == "__main__":
    serve()
