"""Identify processes by pid and start time, and a mesh's processes by environment."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import psutil

from thaw.launcher.identity import Identity as Identity
from thaw.launcher.identity import identify as identify
from thaw.launcher.identity import start_time as start_time

MARK = "THAW_SUPERVISED"
"""Set in the environment of every process that a supervisor starts, to its program's name, and
inherited by theirs. Together with THAW_HOME it distinguishes a mesh's processes from a user's shell
that merely has THAW_HOME exported.
"""


def find_marked(home: Path) -> list[Identity]:
    """Return all living processes that a supervisor of `home` started or forked.

    This process and its ancestors are never included.
    """
    mine = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    found: list[Identity] = []
    for process in psutil.process_iter():
        if process.pid in mine:
            continue
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        if environment.get(MARK) and environment.get("THAW_HOME") == str(home) and (known := identify(process.pid)):
            found.append(known)
    return [p for p in found if p.is_alive()]


def descendants(identity: Identity) -> list[Identity]:
    """Living children of a living process, and theirs."""
    if not identity.is_alive():
        return []
    try:
        children = psutil.Process(identity.pid).children(recursive=True)
    except psutil.Error:
        return []
    return [known for child in children if (known := identify(child.pid)) is not None]


def end(processes: Iterable[Identity], within_s: float, signum: int = signal.SIGTERM) -> int:
    """Ask `processes` to end, and kill those that do not within `within_s` seconds.

    The function waits until all are gone.

    Returns:
        Number of processes that were killed.
    """
    remaining = [p for p in processes if p.is_alive()]
    for process in remaining:
        process.send(signum)
    remaining = _await_end(remaining, within_s)
    for process in remaining:
        process.send(signal.SIGKILL)
    killed = len(remaining)
    _await_end(remaining, 10.0)
    return killed


def _await_end(processes: list[Identity], within_s: float) -> list[Identity]:
    handles = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            handles.append(psutil.Process(process.pid))
    psutil.wait_procs(handles, timeout=within_s)
    return [p for p in processes if p.is_alive()]
