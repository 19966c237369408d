"""Processes by what cannot be mistaken: a pid together with its start time; and those of a mesh by their environment."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

_LINUX = sys.platform.startswith("linux")
MARK = "THAW_SUPERVISED"
"""Set in the environment of every process that a supervisor starts, and inherited by theirs. Together with THAW_HOME it tells a
mesh's processes from a user's shell that merely has THAW_HOME exported."""


class Identity(BaseModel):
    """A process for certain: pids are reused, a pid with its start time (of the kernel's clock) is not."""

    model_config = ConfigDict(frozen=True)
    pid: int
    started: float

    def alive(self) -> bool:
        return start_time(self.pid) == self.started and not _is_zombie(self.pid)

    def send(self, signum: int, *, group: bool = False) -> None:
        """Signal the process, or the group it leads; harmless if it is gone."""
        if not self.alive():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group and os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, signum)
            else:
                os.kill(self.pid, signum)


def start_time(pid: int) -> float | None:
    """When `pid` started: clock ticks since boot on Linux (immune to the wall clock being set), Unix seconds elsewhere. None: no such process."""
    if _LINUX:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        return float(stat.rpartition(")")[2].split()[19])
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def identify(pid: int) -> Identity | None:
    started = start_time(pid)
    return None if started is None else Identity(pid=pid, started=started)


def _is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def marked(home: Path) -> list[Identity]:
    """Every living process that a supervisor of `home` started, directly or not; never this process or its ancestors."""
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
    return [p for p in found if p.alive()]


def descendants(identity: Identity) -> list[Identity]:
    """Living children of a living process, and theirs."""
    if not identity.alive():
        return []
    try:
        children = psutil.Process(identity.pid).children(recursive=True)
    except psutil.Error:
        return []
    return [known for child in children if (known := identify(child.pid)) is not None]


def end(processes: Iterable[Identity], within_s: float, signum: int = signal.SIGTERM) -> int:
    """Ask `processes` to end, kill after `within_s` those that did not, and wait until all are gone. Returns how many were killed."""
    remaining = [p for p in processes if p.alive()]
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
    return [p for p in processes if p.alive()]
