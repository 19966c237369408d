"""The loader, which stops itself at chosen steps: `python -m tests.support.stopping_loader`.

A test writes the name of a step to the file THAW_TEST_STOP_FILE. When the loader reaches the step,
it removes the file and sends itself SIGSTOP. The test then kills a process, and lets the loader
continue or not.

    reserve    pages are reserved for a load, and no other part of the loader knows it yet
    copy       one unit's bytes are copied, and the unit is still incomplete
    map        every unit is there, and the handle for engines is being made
    release    the last holder has gone, and its units are about to be released
    lend       pages are lent to a KV cache, and its engine does not know it yet
    take_back  an engine has unmapped pages and returned them, and they are still lent
    peer       one unit's bytes are copied from another device, and the unit is still incomplete
    hold       some units are there. Copies wait until the test removes the file with the suffix
               HELD, and the loader does everything else
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.loader import auditing
from services.loader.app import run
from services.loader.domain import lifecycle
from services.loader.settings import LoaderSettings
from shared.runtime import run_service
from weights.store.lending import Lender
from weights.store.memory import PageMemory
from weights.store.separate import SeparateDevice

VARIABLE = "THAW_TEST_STOP_FILE"
STEPS = ("reserve", "copy", "map", "release")
LENDING_STEPS = ("lend", "take_back")
HELD = ".held"
HELD_AFTER = 8
"""Writes to pages before copies wait."""


def stop_at(step: str) -> None:
    """Stop this process if the test has asked for this step."""
    path = Path(os.environ[VARIABLE])
    if path.exists() and path.read_text() == step:
        path.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)


def _stopping(write: Callable[..., None]) -> Callable[..., None]:
    """Stop after a copy, or let all copies of the thread wait."""
    count = 0

    def wrapped(*arguments: Any) -> None:
        nonlocal count
        write(*arguments)
        stop_at("peer" if threading.current_thread().name.startswith("peer-") else "copy")
        path = Path(os.environ[VARIABLE])
        if path.exists() and path.read_text() == "hold":
            count += 1
            if count == HELD_AFTER:
                count = 0
                held = path.with_suffix(HELD)
                held.touch()
                path.unlink()
                while held.exists():
                    time.sleep(0.02)

    return wrapped


def _wrap(owner: type, method: str, step: str, *, before: bool = False) -> None:
    original: Callable[..., Any] = getattr(owner, method)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if before:
            stop_at(step)
        found = original(*arguments, **options)
        if not before:
            stop_at(step)
        return found

    setattr(owner, method, wrapped)


if __name__ == "__main__":
    _wrap(SeparateDevice, "allocate", "reserve")
    PageMemory.write = _stopping(PageMemory.write)  # type: ignore[method-assign]
    _wrap(SeparateDevice, "handle_of", "map", before=True)
    _wrap(SeparateDevice, "remove", "release", before=True)
    _wrap(Lender, "lend", "lend")
    _wrap(Lender, "take_back", "take_back", before=True)
    if "--in-a-mesh" not in sys.argv:
        # Of the nodeagent's silence, and between two audits: in real time a test would wait long.
        lifecycle.LOST_AFTER_S = lifecycle.MISSING_FOR_S = 0.2
        auditing._CONFIRM_AFTER_S = 0.05
    sys.exit(run_service("loader", LoaderSettings, run))
