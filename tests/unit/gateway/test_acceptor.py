"""The gateway accepts a few connections in each turn of the event loop."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator

import pytest

from services.gateway.http import server
from services.gateway.http.server import Acceptor
from shared.ports import free_port

CONNECTIONS = 200


class Counting(asyncio.Protocol):
    """Counts connections, and those made in one turn of the loop."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.counts[-1] += 1
        transport.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    # Not an ephemeral port: a client of an earlier server could connect to it, and be counted.
    with socket.create_server(("127.0.0.1", free_port()), backlog=CONNECTIONS) as listening:
        listening.setblocking(False)
        yield listening


def clients(listener: socket.socket, number: int) -> list[socket.socket]:
    return [socket.create_connection(listener.getsockname()) for _ in range(number)]


async def turns_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the test counts turns of the loop
            await asyncio.sleep(0)


async def test_a_burst_of_connections_shares_the_loop(listener: socket.socket) -> None:
    waiting = clients(listener, CONNECTIONS)
    counts = [0]
    acceptor = Acceptor(listener, lambda: Counting(counts))
    async with asyncio.timeout(60):
        while sum(counts) < CONNECTIONS:
            counts.append(0)
            await asyncio.sleep(0)
    acceptor.close()
    await acceptor.wait_closed()
    for client in waiting:
        assert client.recv(1) == b"", "each was served, and closed"
        client.close()
    assert max(counts) <= 2 * server._ACCEPTS_PER_TURN, max(counts)


async def test_acceptor_resumes_after_running_out_of_file_descriptors(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_RETRY_DELAY_S", 0.01)
    failures = [OSError(errno.EMFILE, "Too many open files")]

    class Failing:
        def accept(self) -> tuple[socket.socket, object]:
            if failures:
                raise failures.pop()
            return listener.accept()

        def fileno(self) -> int:
            return listener.fileno()

    counts = [0]
    acceptor = Acceptor(Failing(), lambda: Counting(counts))  # type: ignore[arg-type]  # the two methods that are used
    (client,) = clients(listener, 1)
    await turns_until(lambda: bool(counts[0]))
    assert not failures
    acceptor.close()
    await acceptor.wait_closed()
    client.close()


async def test_handshakes_are_bounded(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_HANDSHAKES", 16)
    loop = asyncio.get_running_loop()
    release, started = asyncio.Event(), 0

    async def slow_handshake(_: object, connection: socket.socket, **__: object) -> None:
        nonlocal started
        started += 1
        await release.wait()
        connection.close()

    monkeypatch.setattr(loop, "connect_accepted_socket", slow_handshake)
    waiting = clients(listener, 40)
    acceptor = Acceptor(listener, lambda: Counting([0]))
    await turns_until(lambda: started == 16)
    for _ in range(20):
        await asyncio.sleep(0)
    assert started == 16, "the others wait in the backlog"
    release.set()
    await turns_until(lambda: started == 40)
    acceptor.close()
    await acceptor.wait_closed()
    for client in waiting:
        client.close()
