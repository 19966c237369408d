"""Pin nodes of one machine to separate cores, as if they were separate machines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

import psutil


def pin(processes: Iterable[psutil.Process], nodes: Mapping[str, Set[int]], rest: Set[int]) -> None:
    """Pin each node's processes to its cores, and all others to `rest`.

    A node's processes are nodeagent, loader and engines. This process is pinned to `rest`, too.
    Processes that start later inherit the cores.
    """
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
