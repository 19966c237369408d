"""Start a mesh's processes, and wait for their exits.

The starter forks services from a server that has imported all of them. Such a start takes some 20
ms, where the imports of a service take a half to a whole CPU second, and the services share the
memory of the imports. Servers such as NATS start as usual; so do services if the fork server does
not work.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import thaw
from thaw.launcher.forkserver.client import ForkServer, ForkServerFailed, exit_status
from thaw.launcher.home import Home
from thaw.launcher.processes import MARK, Identity
from thaw.launcher.services import SERVICES, Program

log = logging.getLogger("thaw.supervisor")
_IMPORTS_WITHIN_S = 60.0
_MAX_FAILURES = 3
"""After this many fork servers have failed in a row, the starter makes no more."""
Wait = Callable[[], Awaitable[int | None]]


@dataclass(frozen=True)
class Started:
    """A process, and how to wait for its exit status."""

    pid: int
    wait: Wait


class Starter:
    """Starts processes as children of this one, each in a session of its own.

    Args:
        environment: Environment variables of all services.
    """

    def __init__(self, home: Home, environment: Mapping[str, str]) -> None:
        self._home = home
        self._environment = {**inherited_environment(), **environment, MARK: "forkserver"}
        self._server: ForkServer | None = None
        self._failures = 0 if sys.platform.startswith("linux") else _MAX_FAILURES

    def prepare(self) -> None:
        """Start the fork server, unless one runs or too many have failed."""
        if self._server is None and self._failures < _MAX_FAILURES:
            with self._home.log("supervisor").open("ab") as output:
                self._server = ForkServer(SERVICES, self._environment, self._home.root, output.fileno())

    async def start(self, program: Program, environment: Mapping[str, str], handed: Mapping[str, str]) -> Started:
        """Start a program; its output goes to its log.

        Args:
            environment: Variables in addition to those of `program`.
            handed: Variables whose values are file descriptors that the process inherits.

        Raises:
            OSError: The program could not be started.
        """
        complete = {**inherited_environment(), **program.environment, MARK: program.name, **environment, **handed}
        files = tuple(int(fd) for fd in handed.values())
        with self._home.log(program.name).open("ab") as output:
            if program.module is not None:
                pid = await asyncio.to_thread(self._fork, program.module, complete, output.fileno(), files)
                if pid is not None:
                    return Started(pid, _until_exited(pid))
            child = await asyncio.create_subprocess_exec(
                *program.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=complete,
                pass_fds=files,
                cwd=self._home.root,
                start_new_session=True,
            )
            return Started(child.pid, child.wait)

    def _fork(self, module: str, environment: Mapping[str, str], output: int, files: tuple[int, ...]) -> int | None:
        """Fork a process and return its pid; None: it has to be started in another way."""
        server = self._server
        if server is None:
            self.prepare()  # for the next start: its imports take longer than those of one service
            return None
        try:
            if not server.await_ready(_IMPORTS_WITHIN_S):
                raise ForkServerFailed("the fork server did not finish its imports")
            null = os.open(os.devnull, os.O_RDONLY)
            try:
                numbers = {0: null, 1: output, 2: output} | {fd: fd for fd in files}
                pid = server.start(module, environment=environment, directory=self._home.root, files=numbers, session=True)
            finally:
                os.close(null)
        except ForkServerFailed as e:
            log.warning("starting %s without the fork server: %s", module, e)
            self._failures += 1
            self.close()
            return None
        self._failures = 0
        return pid

    def close(self) -> None:
        """End the fork server; the processes that it forked keep running."""
        if self._server is not None:
            self._server.close()
            self._server = None


def inherited_environment() -> dict[str, str]:
    """Return this process's environment, with a PYTHONPATH that finds a checkout's packages."""
    source = str(Path(thaw.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": source if not inherited else f"{source}{os.pathsep}{inherited}"}


def _until_exited(pid: int) -> Wait:
    """Wait for a child that asyncio did not start."""

    async def wait() -> int | None:
        while (status := exit_status(pid)) is None:
            await _await_readable(os.pidfd_open(pid))
        return status

    return wait


def until_gone(process: Identity) -> Wait:
    """Wait for the end of a process that is not a child of this one, without its exit status."""

    async def wait() -> int | None:
        if not hasattr(os, "pidfd_open"):  # macOS has no event for the end of a process that is not a child
            while process.is_alive():  # noqa: ASYNC110
                await asyncio.sleep(0.25)
            return None
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return None
        if process.is_alive():
            await _await_readable(handle)
        else:
            os.close(handle)
        return None

    return wait


async def _await_readable(handle: int) -> None:
    """Wait until a file descriptor is readable, and close it."""
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(handle, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
