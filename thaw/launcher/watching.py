"""Find processes of the mesh that live and make no progress.

Services are watched by their heartbeats, servers by probes of their port.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping

from shared.watchdog.decision import Limits, Look, Watch, describe, is_hung, observe
from shared.watchdog.heartbeat import VARIABLE, Ear
from shared.watchdog.process import cpu_wait_s, state_of
from thaw.errors import CommandError
from thaw.launcher.home import Home
from thaw.launcher.lifecycle import Hung
from thaw.launcher.probes import is_alive
from thaw.launcher.services import Program

LOOK_S = 1.0
_PROBE_S = 3.0
_READY_POLL_S = 0.05
"""Only while a service starts."""
SETTING = "THAW_WATCHDOG_S"


def limits_of(environment: Mapping[str, str]) -> Limits:
    """Read THAW_WATCHDOG_S. Raises `CommandError` if it is no number of seconds."""
    given = environment.get(SETTING) or str(Limits.loop_s)
    with contextlib.suppress(ValueError):
        if 0 <= (loop_s := float(given)) < float("inf"):
            return Limits(loop_s)
    raise CommandError(f"{SETTING} is {given!r}.", "Set it to a number of seconds, or to 0 for no watchdog.", code="bad_setting")


class _Probed:
    """A server's answers to probes, counted as heartbeats."""

    def __init__(self, name: str, port: int) -> None:
        self.beats = 0
        self.in_loop = False
        self._task = asyncio.create_task(self._probe(name, port), name=f"watch {name}")

    async def _probe(self, name: str, port: int) -> None:
        while True:
            if await is_alive(name, port):
                self.beats += 1
                self.in_loop = True
            await asyncio.sleep(_PROBE_S)

    def collect(self) -> None:
        """The task counts by itself."""

    def close(self) -> None:
        self._task.cancel()


class Watcher:
    """Watcher of given processes.

    `look`, called each second, returns each hanging process once.
    """

    def __init__(self, home: Home, limits: Limits) -> None:
        self._home = home
        self._limits = limits
        self._pulses: dict[str, Ear | _Probed] = {}
        self._watches: dict[str, tuple[int, Watch | None]] = {}

    def prepare(self, program: Program) -> dict[str, str]:
        """Return what a process about to start needs in its environment."""
        self.forget(program.name)
        if program.port is not None:
            return {}
        ear = Ear(self._home.heartbeat_socket(program.name))
        self._pulses[program.name] = ear
        return {VARIABLE: str(ear.path)}

    async def until_ready(self, name: str) -> None:
        """Return when the service reports that it is ready.

        There is no time limit: the caller cancels the wait.
        """
        ear = self._pulses[name]
        while isinstance(ear, Ear) and not ear.is_ready:
            ear.collect()
            await asyncio.sleep(_READY_POLL_S)

    def begin(self, program: Program, pid: int, *, in_loop: bool = False) -> None:
        """Watch the process of a program that was prepared.

        Args:
            in_loop: The process's event loop runs already: an earlier supervisor saw it ready.
        """
        if program.port is not None:
            self._pulses[program.name] = _Probed(program.name, program.port)
        if in_loop:
            self._pulses[program.name].in_loop = True
        self._watches[program.name] = (pid, None)

    def forget(self, name: str) -> None:
        self._watches.pop(name, None)
        if (pulse := self._pulses.pop(name, None)) is not None:
            pulse.close()

    def close(self) -> None:
        for name in list(self._pulses):
            self.forget(name)

    def look(self) -> list[Hung]:
        found = []
        for name, (pid, before) in list(self._watches.items()):
            watch = self._observe(name, pid, before)
            self._watches[name] = (pid, watch)
            if is_hung(watch, self._limits):
                del self._watches[name]
                found.append(Hung(name, describe(watch)))
        return found

    def _observe(self, name: str, pid: int, before: Watch | None) -> Watch:
        pulse = self._pulses[name]
        pulse.collect()
        look = Look(time.monotonic(), pulse.beats, pulse.in_loop)
        if before is None or before.last.beats != pulse.beats:
            return observe(before, look)
        # The kernel is asked only of processes that are silent.
        return observe(before, Look(look.at, look.beats, look.in_loop, state_of(pid), cpu_wait_s(pid)))
