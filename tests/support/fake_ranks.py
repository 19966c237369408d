"""Ranks of a fake engine on several nodes: they meet at the first one's port before it serves."""

from __future__ import annotations

import argparse
import socket
import sys
import time

_WITHIN_S = 60.0


def meet(options: argparse.Namespace) -> list[socket.socket]:
    """Wait, as the first rank, until all others have connected. Return their connections."""
    with socket.create_server((options.master_addr, int(options.master_port))) as listener:
        listener.settimeout(_WITHIN_S)
        found = [listener.accept()[0] for _ in range(int(options.nnodes) - 1)]
    sys.stderr.write("all ranks have met\n")
    return found


def follow(options: argparse.Namespace) -> int:
    """Be a later rank until the first one has ended. Return the exit status."""
    deadline = time.monotonic() + _WITHIN_S
    while True:
        try:
            connection = socket.create_connection((options.master_addr, int(options.master_port)))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    with connection:
        while connection.recv(1):
            pass
    return 1
