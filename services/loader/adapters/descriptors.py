"""Send lines with file descriptors over a Unix socket that asyncio serves."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from asyncio import StreamWriter
from collections.abc import Callable, Sequence

from shared.errors import EngineFailed, Unreachable

_WITHIN_S = 30.0
"""Seconds that a reader may accept no byte."""


def peer_process(writer: StreamWriter) -> int | None:
    """Return the process at the other end of a Unix socket; None: it is not visible here."""
    connected = writer.get_extra_info("socket")
    if connected is None:
        return None
    found: int = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
    return found or None


def visible_process(writer: StreamWriter) -> int:
    """Return the process that is connected. Raises `EngineFailed` if the loader cannot see it."""
    if (pid := peer_process(writer)) is None:
        raise EngineFailed("The engine's process is not visible to the loader: they must share the PID namespace")
    return pid


def open_again(writer: StreamWriter) -> socket.socket:
    """Return the writer's socket for another thread, which closes it. Nothing may be queued."""
    return socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))


def send_descriptors(peer: socket.socket, line: bytes, export: Callable[[], Sequence[int]]) -> None:
    """Send a line with descriptors. Blocks. The socket and the descriptors are closed here.

    Args:
        peer: As `open_again` returns it.
        line: The line.
        export: Returns the descriptors, at most 253 (SCM_MAX_FD).

    Raises:
        Unreachable: The reader has disconnected, or takes nothing.
        ThawError: Of `export`.
    """
    with peer:
        descriptors = export()
        try:
            _send_all(peer, line, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _send_all(peer: socket.socket, line: bytes, descriptors: Sequence[int]) -> None:
    poll, deadline = select.poll(), time.monotonic() + _WITHIN_S
    poll.register(peer, select.POLLOUT)
    while line:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise Unreachable(f"The engine took no descriptors for {_WITHIN_S:.0f} s")
        try:
            sent = socket.send_fds(peer, [line], descriptors) if descriptors else peer.send(line)
        except BlockingIOError:
            continue
        except OSError as e:
            raise Unreachable(f"The engine has disconnected: {e}") from e
        line, descriptors = line[sent:], ()
