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


class HeartbeatSender:
    """Sends heartbeats while an event loop runs; does nothing without a watcher."""

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._is_ready = False

    @classmethod
    def from_environment(cls) -> HeartbeatSender | None:
        """Return a sender to the address in the environment, which is removed there.

        Otherwise children (engines) would send heartbeats in this process's name.
        """
        address = os.environ.pop(VARIABLE, "")
        return cls(address) if address.startswith(("/", "@")) else None

    def send_every_second(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send a heartbeat now and each second from now on."""
        self._send(_READY + b"\n" + _BEAT if self._is_ready else _BEAT)
        loop.call_later(BEAT_S, self.send_every_second, loop)

    def report_ready(self) -> None:
        """Notify the watcher that the service serves; each further heartbeat repeats it."""
        self._is_ready = True
        self._send(_READY)

    def close(self) -> None:
        """Report that the event loop has ended; the watcher then allows a longer silence."""
        self._send(_END)
        self._socket.close()

    def _send(self, message: bytes) -> None:
        # A full queue or a missing socket: the watcher is stopped or was killed. The service
        # continues without it.
        with contextlib.suppress(OSError):
            self._socket.sendto(message, self._address)


class HeartbeatReceiver:
    """Receives one service's heartbeats on a socket at `path`. `collect` never blocks."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path = path
        self.beats = 0
        self.is_loop_running = False
        self.is_ready = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))

    def collect(self) -> None:
        """Count the heartbeats that have arrived since the last call."""
        while True:
            try:
                message = self._socket.recv(256)
            except BlockingIOError:
                return
            if _READY in message:
                self.is_ready = True
            if _BEAT in message:
                self.beats += 1
                self.is_loop_running = True
            elif _END in message:
                self.is_loop_running = False

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):  # the next one at this path replaces it
            self.path.unlink(missing_ok=True)
