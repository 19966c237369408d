"""Processes that may map units or lent pages of a GPU, until they have exited (ADR 0060)."""

from __future__ import annotations

import os
import select
from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

_Thing = TypeVar("_Thing", bound=Hashable)


class Receivers(Generic[_Thing]):
    """Which processes may map which things. Not thread-safe.

    A process counts from before it is sent a descriptor or page until its pidfd reports its exit.
    The kernel has then closed its files, the driver's among them, and so undone its mappings.
    """

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}
        self._things: dict[int, set[_Thing]] = {}

    def add(self, pid: int, *things: _Thing) -> None:
        """Count a process as one that maps these things.

        Raises:
            ProcessLookupError: There is no such process.
        """
        self._forget_exited()
        if pid not in self._pidfds:
            self._pidfds[pid] = os.pidfd_open(pid)
            self._things[pid] = set()
        self._things[pid].update(things)

    def list_processes(self, thing: _Thing) -> list[int]:
        """Return the running processes that may map `thing`."""
        self._forget_exited()
        return sorted(pid for pid, things in self._things.items() if thing in things)

    def mappers(self) -> dict[_Thing, list[int]]:
        """Return all things that running processes may map, and these processes."""
        self._forget_exited()
        found: dict[_Thing, list[int]] = {}
        for pid in sorted(self._things):
            for thing in self._things[pid]:
                found.setdefault(thing, []).append(pid)
        return found

    def forget(self, things: Collection[_Thing]) -> None:
        """Forget things that exist no more."""
        for mine in self._things.values():
            mine.difference_update(things)

    def close(self) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()
        self._things.clear()

    def _forget_exited(self) -> None:
        poll = select.poll()
        for pidfd in self._pidfds.values():
            poll.register(pidfd, select.POLLIN)
        exited = {pidfd for pidfd, _ in poll.poll(0)} if self._pidfds else set()
        for pid, pidfd in list(self._pidfds.items()):
            if pidfd in exited:
                os.close(pidfd)
                del self._pidfds[pid], self._things[pid]
