"""The relay between a Unix socket and an engine's port."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import subprocess
import sys
import threading
from pathlib import Path

from services.enginehost.runtimes import relay

_FEW = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
os.execv(sys.executable, [sys.executable, "-IS", *sys.argv[1:]])
"""


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(4096):
            self.request.sendall(data)


class _Engine(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64


def test_connections_beyond_the_relays_descriptors_wait_for_others_to_end(tmp_path: Path) -> None:
    """The relay's end would leave the engine unreachable."""
    with (
        _Engine(("127.0.0.1", 0), _Echo) as engine,
        socket.socket(socket.AF_UNIX) as listener,
        contextlib.ExitStack() as opened,
    ):
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        listener.bind(str(tmp_path / "s"))
        listener.listen(64)
        arguments = [relay.__file__, str(listener.fileno()), str(engine.server_address[1])]
        process = subprocess.Popen([sys.executable, "-c", _FEW, *arguments], pass_fds=(listener.fileno(),))
        try:
            clients = [opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(20)]
            for client in clients:
                client.settimeout(60)
                client.connect(str(tmp_path / "s"))
                client.sendall(b"hello")
            for client in clients:
                assert client.recv(16) == b"hello"
                client.close()
        finally:
            process.kill()
            process.wait()
            engine.shutdown()
