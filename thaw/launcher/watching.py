"""Find processes of the mesh that are alive and make no progress.

Services send heartbeats; servers are probed at their port.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace

from shared.watchdog.decision import Limits, Observation, Watch, describe, is_hung, observe
from shared.watchdog.heartbeat import VARIABLE, HeartbeatReceiver
from shared.watchdog.process import cpu_wait_s, state_of
from thaw.errors import CommandError
from thaw.launcher.home import Home
from thaw.launcher.lifecycle import Hung
from thaw.launcher.probes import is_alive
from thaw.launcher.services import Program

OBSERVE_INTERVAL_S = 1.0
_PROBE_S = 3.0
_READY_POLL_S = 0.05
"""Poll interval while a service starts."""
SETTING = "THAW_WATCHDOG_S"


def limits_of(environment: Mapping[str, str]) -> Limits:
    """Read THAW_WATCHDOG_S. Raises `CommandError` if it is no number of seconds."""
    given = environment.get(SETTING) or str(Limits.loop_s)
    with contextlib.suppress(ValueError):
        if 0 <= (loop_s := float(given)) < float("inf"):
            return Limits(loop_s)
    raise CommandError(f"{SETTING} is {given!r}.", "Set it to a number of seconds, or to 0 for no watchdog.", code="bad_setting")


class _ServerProbe:
    """Probes of a server, of which each answer counts as a heartbeat.

    Has the attributes and methods of `HeartbeatReceiver` that the watcher uses.
    """

    def __init__(self, name: str, port: int) -> None:
        self.beats = 0
        self.is_loop_running = False
        self._task = asyncio.create_task(self._probe(name, port), name=f"watch {name}")

    async def _probe(self, name: str, port: int) -> None:
        while True:
            if await is_alive(name, port):
                self.beats += 1
                self.is_loop_running = True
            await asyncio.sleep(_PROBE_S)

    def collect(self) -> None:
        """Do nothing: the probing task counts the answers."""

    def close(self) -> None:
        self._task.cancel()


class Watcher:
    """Observes the processes that it was given."""

    def __init__(self, home: Home, limits: Limits) -> None:
        self._home = home
        self._limits = limits
        self._heartbeats: dict[str, HeartbeatReceiver | _ServerProbe] = {}
        self._watches: dict[str, tuple[int, Watch | None]] = {}

    def prepare(self, program: Program) -> dict[str, str]:
        """Return the variables that a process needs in its environment, before it is started."""
        self.forget(program.name)
        if program.port is not None:
            return {}
        receiver = HeartbeatReceiver(self._home.heartbeat_socket(program.name))
        self._heartbeats[program.name] = receiver
        return {VARIABLE: str(receiver.path)}

    async def until_ready(self, name: str) -> None:
        """Return when the service reports that it is ready.

        There is no time limit: the caller cancels the wait.
        """
        receiver = self._heartbeats[name]
        while isinstance(receiver, HeartbeatReceiver) and not receiver.is_ready:
            receiver.collect()
            await asyncio.sleep(_READY_POLL_S)

    def begin(self, program: Program, pid: int, *, is_loop_running: bool = False) -> None:
        """Watch the process of a program that was prepared.

        Args:
            program: The program.
            pid: Its process.
            is_loop_running: The process was ready under an earlier supervisor.
        """
        if program.port is not None:
            self._heartbeats[program.name] = _ServerProbe(program.name, program.port)
        if is_loop_running:
            self._heartbeats[program.name].is_loop_running = True
        self._watches[program.name] = (pid, None)

    def forget(self, name: str) -> None:
        self._watches.pop(name, None)
        if (heartbeats := self._heartbeats.pop(name, None)) is not None:
            heartbeats.close()

    def close(self) -> None:
        for name in list(self._heartbeats):
            self.forget(name)

    def find_hung(self) -> list[Hung]:
        """Return the processes that hang, each once. Call it every `OBSERVE_INTERVAL_S`."""
        found = []
        for name, (pid, before) in list(self._watches.items()):
            watch = self._observe(name, pid, before)
            self._watches[name] = (pid, watch)
            if is_hung(watch, self._limits):
                del self._watches[name]
                found.append(Hung(name, describe(watch)))
        return found

    def _observe(self, name: str, pid: int, before: Watch | None) -> Watch:
        heartbeats = self._heartbeats[name]
        heartbeats.collect()
        observation = Observation(time.monotonic(), heartbeats.beats, heartbeats.is_loop_running)
        if before is not None and before.last.beats == heartbeats.beats:  # the kernel is asked only about silent processes
            observation = replace(observation, state=state_of(pid), cpu_wait_s=cpu_wait_s(pid))
        return observe(before, observation)
