"""Processes that outlived their supervisor, to be taken over by the next one."""

from __future__ import annotations

from collections.abc import Iterable

import psutil

from thaw.launcher.home import Home
from thaw.launcher.leftovers import running_postgres
from thaw.launcher.processes import MARK, Identity, find_marked, identify
from thaw.launcher.services import Program
from thaw.launcher.status import MeshStatus


def find_survivors(home: Home, programs: Iterable[Program], status: MeshStatus | None) -> dict[str, Identity]:
    """Return the living process of each program that has one.

    A supervisor that is killed between the start of a process and the writing of its status leaves
    a process that the status does not name. Such a process is found by its environment, which names
    its program, and by its arguments: two gateways or nodeagents of one mesh corrupt each other's
    responses.

    Args:
        status: The last status of the previous supervisor.
    """
    known = {name: s.process for name, s in status.services.items() if s.process and s.process.is_alive()} if status else {}
    unknown = {p.name: p for p in programs if p.name not in known}
    if not unknown:
        return known
    found = _by_environment(home, unknown)
    if "postgres" in unknown and (postmaster := running_postgres(home)) is not None:
        found["postgres"] = postmaster  # PostgreSQL overwrites its environment with its process titles
    return found | known


def _by_environment(home: Home, programs: dict[str, Program]) -> dict[str, Identity]:
    candidates: dict[int, tuple[str, int]] = {}
    for process in find_marked(home.root):
        try:
            handle = psutil.Process(process.pid)
            name, arguments, parent = handle.environ().get(MARK, ""), handle.cmdline(), handle.ppid()
        except psutil.Error:
            continue
        if name in programs and _runs(programs[name], arguments):
            candidates[process.pid] = (name, parent)
    return {
        name: identity
        for pid, (name, parent) in candidates.items()
        if candidates.get(parent, ("", 0))[0] != name and (identity := identify(pid)) is not None
    }


def _runs(program: Program, arguments: list[str]) -> bool:
    """True if a process has the program's arguments.

    An interpreter may precede a script.
    """
    wanted = list(program.command[1:])
    return bool(wanted) and arguments[-len(wanted) :] == wanted
