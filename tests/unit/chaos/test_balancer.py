"""The balancer distributes connections over gateways.

It skips a gateway that refuses, and closes the client's connection if the gateway's breaks.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from bench.chaos.balancer import Balancer
from shared.ports import free_port


class Echo:
    """Answers each connection with its name; closes it on request."""

    def __init__(self, name: bytes) -> None:
        self.listener = socket.create_server(("127.0.0.1", free_port()))
        self.port: int = self.listener.getsockname()[1]
        self.connections: list[socket.socket] = []
        self._name = name
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            connection.sendall(self._name)

    def close(self) -> None:
        self.listener.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def echoes() -> Iterator[list[Echo]]:
    made = [Echo(b"a"), Echo(b"b")]
    yield made
    for echo in made:
        echo.close()


def ask(balancer: Balancer) -> tuple[socket.socket, str]:
    connection = socket.create_connection(("127.0.0.1", balancer.port), timeout=60)
    return connection, connection.recv(1).decode()


def test_connections_are_distributed_round_robin_and_attributed_to_gateways(echoes: list[Echo]) -> None:
    balancer = Balancer({"a": echoes[0].port, "b": echoes[1].port})
    try:
        asked = [ask(balancer) for _ in range(4)]
        assert sorted(name for _, name in asked) == ["a", "a", "b", "b"]
        assert [balancer.gateway_of(c.getsockname()[1]) for c, _ in asked] == [name for _, name in asked]
        for connection, _ in asked:
            connection.close()
    finally:
        balancer.close()


def test_refusing_gateway_is_skipped(echoes: list[Echo]) -> None:
    balancer = Balancer({"gone": free_port(), "a": echoes[0].port})
    try:
        for _ in range(3):
            connection, name = ask(balancer)
            assert name == "a"
            connection.close()
    finally:
        balancer.close()


def test_a_broken_connection_breaks(echoes: list[Echo]) -> None:
    balancer = Balancer({"a": echoes[0].port})
    try:
        connection, _ = ask(balancer)
        echoes[0].connections[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        echoes[0].connections[0].close()
        with connection, contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    finally:
        balancer.close()
