"""Connections that were kept, and that the network has forgotten since."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from shared.ports import free_port
from weights.tiers.connection import Patience
from weights.tiers.http_client import HttpClient

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class ForgetfulServer:
    """Answers the first request of each connection; later ones are lost."""

    def __init__(self, listener: socket.socket) -> None:
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        self.lost = 0
        self._listener = listener
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if connection.recv(65536):
                connection.sendall(ANSWER)
            while connection.recv(65536):
                self.lost += 1

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


@pytest.fixture
def server() -> Iterator[ForgetfulServer]:
    # Not an ephemeral port: requests of an earlier server's client would count as lost.
    listening = socket.create_server(("127.0.0.1", free_port()))
    with listening as listener, contextlib.closing(ForgetfulServer(listener)) as server:
        yield server


def test_one_silent_connection_is_reason_to_keep_none(server: ForgetfulServer) -> None:
    client = HttpClient(patience=Patience(stall_s=3.0), direct=True)
    with contextlib.closing(client):
        answers = [client.get(server.url) for _ in range(4)]
        for answer in answers:
            with answer:
                assert answer.read(10) == b"ok"
        with client.get(server.url) as answer:
            assert answer.read(10) == b"ok"
    assert server.lost == 1
