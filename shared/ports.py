"""Free TCP ports for servers that this machine starts."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Collection
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 20_000
_EPHEMERAL = 32_768
# Neighbouring process ids get different ports; nothing picks more than this many at a time.
_PER_PROCESS = 8
# The ninth port of a process is far from its first: those in between are for its neighbours.
_STRIDE = 5_003
_calls = itertools.count()


def free_port(host: str = "127.0.0.1", avoid: Collection[int] = ()) -> int:
    """Return a port on which a server can listen now.

    The port is below the ephemeral range: the kernel gives ports of that range to any outgoing
    connection, so a server that starts there later, or again, can find its port taken. Processes
    that pick at the same time pick different ports. If it finds none below the range, the kernel
    picks one.

    Args:
        host: Address to listen on.
        avoid: Ports that are promised to other servers.

    Raises:
        OSError: This machine does not have the address `host`.
    """
    ports = range(_FIRST, _first_ephemeral())
    for _ in ports:
        round_, place = divmod(next(_calls), _PER_PROCESS)
        port = ports[(os.getpid() * _PER_PROCESS + place + round_ * _STRIDE) % len(ports)]
        if port not in avoid and _is_free(host, port):
            return port
    return _bind_port(host, 0)


def keep_port(host: str = "127.0.0.1", avoid: Collection[int] = ()) -> socket.socket:
    """Pick a port as `free_port`, and keep it until the returned socket is closed.

    No other process picks the port meanwhile. A server can listen on it, and again after a restart,
    if it allows to reuse its address (SO_REUSEADDR), as servers usually do. That is so on Linux.
    """
    while True:
        port = free_port(host, avoid)
        kept = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            kept.bind((host, port))
        except OSError:  # another process has just picked it
            kept.close()
            continue
        # Only after the port is bound: before, another socket with this option could have it too.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return kept


def _first_ephemeral() -> int:
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = _EPHEMERAL
    return max(first, _FIRST + 1)


def _is_free(host: str, port: int) -> bool:
    try:
        _bind_port(host, port)
    except OSError:
        # Raised again by the last attempt if it is not the port but the host.
        return False
    return True


def _bind_port(host: str, port: int) -> int:
    """Bind a port that no other socket has, nor keeps for a server that restarts (SO_REUSEADDR)."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        s.bind((host, port))
        return int(s.getsockname()[1])
