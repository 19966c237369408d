"""Run a service, restart it if it hangs: `python -m shared.watchdog -- COMMAND…`.

The watchdog is the main process of a container. It forwards SIGTERM and SIGINT, and exits with the
service's status if the service exits by itself, so that the container's restart policy decides as
without a watchdog. It ends a service that hangs (`THAW_WATCHDOG_S`, 10 s; 0: never) and restarts it
in the same container, so that a nodeagent's engines stay alive and are adopted. As process 1 it
reaps orphans.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from shared.watchdog.decision import Limits, Observation, Watch, describe, is_hung, observe
from shared.watchdog.heartbeat import VARIABLE, HeartbeatReceiver
from shared.watchdog.process import cpu_wait_s, state_of

OBSERVE_INTERVAL_S = 1.0
DUMP_S = 5.0
"""Time that a hung process has to write its stack traces (SIGABRT) before it is killed.

On a busy machine it may not run for seconds.
"""
_POLL_S = 0.05
SETTING = "THAW_WATCHDOG_S"
_ENDS = (signal.SIGTERM, signal.SIGINT)


def limits_from_environment(environment: dict[str, str] | os._Environ[str]) -> Limits:
    """Raises `ValueError` for a setting that is no number of seconds."""
    loop_s = float(environment.get(SETTING) or Limits.loop_s)
    if not 0 <= loop_s < float("inf"):
        raise ValueError(f"{SETTING} must be a number of seconds, or 0")
    return Limits(loop_s)


class Parent:
    """One service, its heartbeats, and the decision about it."""

    def __init__(self, command: list[str], limits: Limits, directory: Path) -> None:
        self._command = command
        self._limits = limits
        self._path = directory / "heartbeat"
        self._stopping = False
        self._start()

    def _start(self) -> None:
        self._heartbeats = HeartbeatReceiver(self._path)
        self._watch: Watch | None = None
        self._observed_at = time.monotonic()
        self._hung = False
        environment = {**os.environ, VARIABLE: str(self._path)}
        self._pid = os.posix_spawnp(self._command[0], self._command, environment, setsigmask=[])

    def run(self) -> int:
        """Return the exit status of the service."""
        watched = {*_ENDS, signal.SIGCHLD}
        while True:
            status = self._reap()
            if status is not None:
                if not self._hung or self._stopping:
                    return status
                self._heartbeats.close()
                self._start()
            received = signal.sigtimedwait(watched, OBSERVE_INTERVAL_S)
            if received is not None and received.si_signo in _ENDS:
                self._stopping = True
                self._send(signal.Signals(received.si_signo))
            elif not self._stopping and not self._hung and time.monotonic() - self._observed_at >= OBSERVE_INTERVAL_S:
                self._observe()  # also while orphans end all the time: process 1 gets a signal for each

    def _reap(self) -> int | None:
        """Reap all exited children; return the service's status if it is among them."""
        found = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._pid:
                    code = os.waitstatus_to_exitcode(ended[1])
                    found = code if code >= 0 else 128 - code
        return found

    def _observe(self) -> None:
        self._observed_at = time.monotonic()
        self._heartbeats.collect()
        observation = Observation(
            time.monotonic(),
            self._heartbeats.beats,
            self._heartbeats.is_loop_running,
            state_of(self._pid),
            cpu_wait_s(self._pid),
        )
        self._watch = observe(self._watch, observation)
        if is_hung(self._watch, self._limits):
            self._end(describe(self._watch))

    def _end(self, reason: str) -> None:
        self._hung = True
        _log("restarting a hung service", command=" ".join(self._command), pid=self._pid, reason=reason)
        self._send(signal.SIGABRT)
        self._await_dump()
        self._send(signal.SIGKILL)

    def _await_dump(self) -> None:
        """Wait until the service has ended, at most `DUMP_S`; a stopped one writes nothing."""
        deadline = time.monotonic() + DUMP_S
        while state_of(self._pid) not in "TtZX" and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _send(self, signum: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signum)


def _log(message: str, **fields: object) -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = {"time": now, "level": "warning", "service": "watchdog", "message": message, **fields}
    sys.stderr.write(json.dumps(line) + "\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> int:
    if len(arguments) < 2 or arguments[0] != "--":
        sys.stderr.write("usage: python -m shared.watchdog -- COMMAND…\n")
        return 2
    try:
        limits = limits_from_environment(os.environ)
    except ValueError as e:
        sys.stderr.write(f"watchdog: {SETTING}={os.environ[SETTING]}: {e}\n")
        return 2
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_ENDS, signal.SIGCHLD})
    directory = Path("/tmp") / f"thaw-watchdog-{os.urandom(8).hex()}"
    directory.mkdir(mode=0o700)
    try:
        return Parent(arguments[1:], limits, directory).run()
    except FileNotFoundError:
        sys.stderr.write(f"watchdog: there is no command {arguments[1]}\n")
        return 127
    finally:
        (directory / "heartbeat").unlink(missing_ok=True)
        directory.rmdir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
