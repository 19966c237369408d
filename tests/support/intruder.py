"""Access to an engine by another user of the machine, and its listening sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest

NOBODY = 65534
_WITHIN_S = 60.0
_LISTENS = "0A"


def listening_sockets(pids: Iterable[int], pid: int | None = None) -> dict[int, str]:
    """Return TCP ports and addresses on which the processes `pids` listen.

    Addresses are as the kernel writes them.

    Args:
        pids: Processes that listen.
        pid: A process in the network namespace to read; by default the test's own.
    """
    open_files = set()
    for each in pids:
        for link in Path(f"/proc/{each}/fd").iterdir():
            try:
                open_files.add(str(link.readlink()))
            except OSError:
                continue
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid or 'self'}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in open_files:
                address, _, port = fields[1].partition(":")
                found[int(port, 16)] = address
    return found


def get_as_another_user(address: str | tuple[str, int], path: str) -> str:
    """Send `GET path` to a Unix socket or a port as user nobody; skips without root.

    Returns:
        The first line of the response, or the name of the error.
    """
    if os.geteuid():
        pytest.skip("needs root to become another user")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, _get_as_nobody(address, path).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        received = file.read()
    os.waitpid(child, 0)
    return received


def _get_as_nobody(address: str | tuple[str, int], path: str) -> str:
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as s:
            s.settimeout(_WITHIN_S)
            s.connect(address)
            s.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
            return s.recv(4096).decode(errors="replace").split("\r\n")[0]
    except Exception as e:  # the error's name is the result
        return type(e).__name__
