"""Nodes of one machine on cores of their own: what they would not share if they were machines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

import psutil


def pin(processes: Iterable[psutil.Process], nodes: Mapping[str, Set[int]], rest: Set[int]) -> None:
    """Have each node's processes (nodeagent, loader, engines) run on its cores, and all others and this one on `rest`. What they start later
    inherits it."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            _pin(process.pid, nodes.get(process.environ().get("THAW_NODE", ""), rest))
    _pin(os.getpid(), rest)


def unpin() -> None:
    """This process runs anywhere again."""
    _pin(os.getpid(), set(range(os.cpu_count() or 1)))


def _pin(pid: int, cores: Set[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)
