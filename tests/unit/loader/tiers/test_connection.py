"""How long each address of a host may take to answer."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from weights.tiers import connection
from weights.tiers.connection import Connection, Origin, Patience

SILENT, SLOW = ("192.0.2.1", 80), ("192.0.2.2", 80)
SLOW_S = 1.0


class Network:
    """A clock, and sockets of which those to `SLOW` connect after `SLOW_S`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.connected: list[Any] = []

    def make_socket(self, *_: Any) -> PendingSocket:
        return PendingSocket(self)

    def wait(self, sock: PendingSocket, _events: int, wait_ms: int) -> bool:
        self.now += wait_ms / 1e3
        return sock.address == SLOW and self.now >= sock.since + SLOW_S


class PendingSocket:
    def __init__(self, network: Network) -> None:
        self._network = network
        self.address: Any = None
        self.since = 0.0

    def setblocking(self, _flag: bool) -> None: ...
    def setsockopt(self, *_: Any) -> None: ...
    def close(self) -> None: ...

    def getsockopt(self, *_: Any) -> int:
        self._network.connected.append(self.address)
        return 0

    def connect(self, address: Any) -> None:
        self.address, self.since = address, self._network.now
        raise BlockingIOError


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    monkeypatch.setattr(socket, "socket", network.make_socket)
    monkeypatch.setattr(time, "monotonic", lambda: network.now)
    monkeypatch.setattr(connection, "_wait", network.wait)
    return network


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


def test_a_silent_address_leaves_time_for_the_next_one(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, SILENT, SLOW)
    Connection(Origin("http", "models.invalid", 80), None, Patience(connect_s=4.0))
    assert network.connected == [SLOW]
    assert network.now < 100.0 + 4.0


def test_all_addresses_together_have_the_time_to_connect(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, *[SILENT] * 8)
    with pytest.raises(TimeoutError):
        Connection(Origin("http", "models.invalid", 80), None, Patience(connect_s=4.0))
    assert network.now == pytest.approx(104.0, abs=1.0)
