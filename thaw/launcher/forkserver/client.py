"""The client's side of a fork server."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from thaw.launcher.forkserver.protocol import GO, READY, Start, encode_modules

MODULE = "thaw.launcher.forkserver"
_START_WITHIN_S = 30.0
"""A server that does not fork for this long hangs."""
_END_WITHIN_S = 2.0


class ForkServerFailed(Exception):
    """The server did not start the process, and will not: start it in another way."""


class ForkServer:
    """A fork server. The server and the processes that it forks are children of this process.

    The constructor returns at once; `await_ready` waits for the server's imports.

    Args:
        modules: Modules that the server imports. `python -m` can run each of them.
        environment: The server's environment variables. Libraries read them during the imports.
        log: The file descriptor of the server's own standard output and error.
        program: The module of the server.
    """

    def __init__(
        self,
        modules: tuple[str, ...],
        environment: Mapping[str, str],
        directory: Path,
        log: int | None = None,
        program: str = MODULE,
    ) -> None:
        self._socket, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_ready = False
        with server:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program],
                stdin=server.fileno(),
                stdout=log,
                stderr=log,
                env=dict(environment),
                cwd=directory,
                start_new_session=True,
            )
        with contextlib.suppress(OSError):
            self._socket.send(encode_modules(modules))

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_ready(self, within_s: float) -> bool:
        """Return whether the server has ended its imports, after at most `within_s` seconds."""
        if not self._is_ready:
            self._socket.settimeout(within_s)
            with contextlib.suppress(OSError):
                self._is_ready = self._socket.recv(len(READY), 0 if within_s else socket.MSG_DONTWAIT) == READY
        return self._is_ready

    def start(
        self, module: str, *arguments: str, environment: Mapping[str, str], directory: Path, files: Mapping[int, int], session: bool
    ) -> int:
        """Run `python -m MODULE ARGUMENTS`; return its pid.

        Args:
            files: File descriptors of this process, by the number that each gets in the new one.

        Raises:
            ForkServerFailed: The server is dead, hangs, or cannot fork.
        """
        start = Start(
            module=module,
            arguments=arguments,
            command=(sys.executable, "-m", module, *arguments),
            environment=dict(environment),
            directory=str(directory),
            files=tuple(files),
            session=session,
        )
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs:
                    self._socket.settimeout(_START_WITHIN_S)
                    socket.send_fds(self._socket, [start.encode()], [theirs.fileno(), *files.values()])
                ours.settimeout(_START_WITHIN_S)
                pid = ours.recv(32)
            except OSError as e:
                raise ForkServerFailed(f"the fork server does not answer: {e}") from e
            if not pid:
                raise ForkServerFailed("the fork server did not fork")
            # If the process has been killed meanwhile, its exit status shows it.
            with contextlib.suppress(OSError):
                ours.send(GO)
            return int(pid)

    def close(self) -> None:
        """End the server; processes that it started keep running."""
        self._socket.close()
        try:
            self._process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def exit_status(pid: int) -> int | None:
    """Return the exit status of a child, negative for a signal; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None
