"""A listening socket outlives the process that serves it."""

from __future__ import annotations

import socket
import subprocess
import sys

from shared.ports import free_port
from thaw.launcher.listeners import VARIABLE, Listeners

SERVER = f"""
import os, socket
connection, _ = socket.socket(fileno=int(os.environ["{VARIABLE}"])).accept()
connection.sendall(str(os.getpid()).encode())
"""


def test_connection_during_a_restart_is_served_by_the_new_process() -> None:
    listeners, port = Listeners(), free_port()
    try:
        for _ in range(2):
            listener = listeners.at("127.0.0.1", port)
            assert listener is not None
            with socket.create_connection(("127.0.0.1", port), timeout=60) as early:
                server = subprocess.Popen(
                    [sys.executable, "-c", SERVER], env={VARIABLE: str(listener.fileno())}, pass_fds=[listener.fileno()]
                )
                assert early.recv(64) == str(server.pid).encode()
                assert server.wait(60) == 0
    finally:
        listeners.close()
    with socket.socket() as late:
        assert late.connect_ex(("127.0.0.1", port)) != 0


def test_address_in_use_gets_no_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert Listeners().at("127.0.0.1", taken.getsockname()[1]) is None
