"""Ends all processes that a test run started, even if the run is killed."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys

from services.enginehost.runtimes import reaper

VARIABLE = "TEST_RUN"
_WITHIN_S = 60.0


def tie_to_this_process() -> None:
    """Kill this process's descendants when it has ended, if they still run."""
    token = secrets.token_hex(8)
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE}  # belongs to an earlier run, and must outlive it
    reading, _held_until_the_end = os.pipe()
    argv = [sys.executable, "-IS", reaper.__file__, f"{VARIABLE}={token}", ""]
    subprocess.run(argv, stdin=reading, env=environment, start_new_session=True, check=True, timeout=_WITHIN_S)
    os.close(reading)
    os.environ[VARIABLE] = token
