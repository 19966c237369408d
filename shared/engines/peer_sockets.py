"""Blocking sockets between engines: their options, and exact reads."""

from __future__ import annotations

import socket

_USER_TIMEOUT_MS = 10_000
"""A peer whose host is gone is detected after this long."""


def configure(sock: socket.socket) -> None:
    """Set the options of a connection: no delay, and early detection of a dead host."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", _USER_TIMEOUT_MS)):
        if (number := getattr(socket, option, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, number, value)


def receive(sock: socket.socket, count: int) -> bytearray:
    """Return exactly `count` bytes.

    Raises:
        EOFError: The other side has ended.
        TimeoutError: It sends nothing for the socket's time-out.
    """
    data = bytearray(count)
    with memoryview(data) as view:
        done = 0
        while done < count:
            got = sock.recv_into(view[done:])
            if got == 0:
                raise EOFError(f"the other engine has closed the connection ({done} of {count} bytes)")
            done += got
    return data
