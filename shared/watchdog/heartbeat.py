"""Heartbeats from a service to its watcher: the datagrams of systemd's sd_notify."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a container's watchdog imports nothing that it does not need
    import asyncio

VARIABLE = "NOTIFY_SOCKET"
BEAT_S = 1.0
_BEAT = b"WATCHDOG=1"
_READY = b"READY=1"
_END = b"STOPPING=1"


class Heart:
    """Sends heartbeats while an event loop runs; does nothing without a watcher."""

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._is_ready = False

    @classmethod
    def from_environment(cls) -> Heart | None:
        """Remove the address from the environment and return a heartbeat.

        Children (engines) must not send heartbeats in this process's name.
        """
        address = os.environ.pop(VARIABLE, "")
        return cls(address) if address.startswith(("/", "@")) else None

    def beat_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send a heartbeat now and each second from now on."""
        self._send(_READY + b"\n" + _BEAT if self._is_ready else _BEAT)
        loop.call_later(BEAT_S, self.beat_on, loop)

    def report_ready(self) -> None:
        """Notify the watcher that the service serves; each further heartbeat repeats it."""
        self._is_ready = True
        self._send(_READY)

    def end(self) -> None:
        """Say that the loop has ended: what follows takes longer than a heartbeat."""
        self._send(_END)
        self._socket.close()

    def _send(self, message: bytes) -> None:
        # A full queue or an absent socket: the watcher is stopped or was killed, which is not this
        # process's concern.
        with contextlib.suppress(OSError):
            self._socket.sendto(message, self._address)


class Ear:
    """Receives one service's heartbeats on a socket at `path`. `collect` never blocks."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path = path
        self.beats = 0
        self.in_loop = False
        self.is_ready = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))

    def collect(self) -> None:
        """Count what has arrived since the last call."""
        while True:
            try:
                message = self._socket.recv(256)
            except BlockingIOError:
                return
            if _READY in message:
                self.is_ready = True
            if _BEAT in message:
                self.beats += 1
                self.in_loop = True
            elif _END in message:
                self.in_loop = False

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):  # the next one at this path replaces it
            self.path.unlink(missing_ok=True)
