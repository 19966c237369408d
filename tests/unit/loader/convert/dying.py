"""Conversions killed at their first, second, … call that changes the disk.

Each runs in a process of its own: `python -m tests.unit.loader.convert.dying SRC DST`. It prints a
line of JSON for each death, with the call and the files beside DST; the last line is the conversion
that survived.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weights.convert import job

_CALLS = ("pwrite", "ftruncate", "fsync", "rename", "mkdir")


def _deadly(name: str, call: Callable[..., Any], left: list[int], write_end: int) -> Callable[..., Any]:
    def dies(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.write(write_end, name.encode())
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return dies


def _child(source: Path, destination: Path, number: int, write_end: int) -> None:
    left = [number]
    for name in _CALLS:
        setattr(os, name, _deadly(name, getattr(os, name), left, write_end))
    job.convert(source, destination)
    os._exit(0)


def main() -> None:
    source, destination = map(Path, sys.argv[1:])
    number, status = 0, -1
    while status != 0:
        number += 1
        read_end, write_end = os.pipe()
        if (pid := os.fork()) == 0:
            _child(source, destination, number, write_end)
        os.close(write_end)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with os.fdopen(read_end) as report:
            call = report.read()
        beside = sorted(p.name for p in destination.parent.iterdir())
        sys.stdout.write(json.dumps({"call": call, "status": status, "beside": beside}) + "\n")
        if destination.exists() and status:
            shutil.rmtree(destination)  # it was complete; the parent has seen that from `beside`


if __name__ == "__main__":
    main()
