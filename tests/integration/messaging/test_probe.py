"""Probes of the connection to NATS, through a relay that breaks it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr

from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.servers import NatsServer

WITHIN_S = 60.0
"""A server that answers at all does so within this time."""
PING = b"PING\r\n"


class Relay:
    """Forwards connections to a NATS server, and breaks the present one at the next ping.

    Attributes:
        closes: The next ping closes the connection.
        drops: The connection of the next ping stays open and loses all that follows.
        broken: Set once one of them is done.
        connections: The number of connections so far.
    """

    def __init__(self, nats: NatsServer) -> None:
        self.url = ""
        self.closes = self.drops = False
        self.broken = asyncio.Event()
        self.connections = 0
        self._nats = nats

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._accept, "127.0.0.1", 0) as server:
            self.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, here = await asyncio.open_connection("127.0.0.1", self._nats.port)
        try:
            await asyncio.gather(self._copy(reader, here), self._copy(there, writer))
        finally:
            here.close()
            writer.close()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        is_half_open = False
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if PING in data and (self.closes or self.drops):
                    is_half_open, is_closed = self.drops, self.closes
                    self.closes = self.drops = False
                    self.broken.set()
                    if is_closed:
                        break
                if not is_half_open:
                    target.write(data)
        target.close()


@pytest.fixture
async def relay(nats_server: NatsServer) -> AsyncIterator[Relay]:
    relay = Relay(nats_server)
    async with relay.serving():
        yield relay


@pytest.fixture
async def relayed(relay: Relay) -> AsyncIterator[Mesh]:
    """Connect to NATS through the relay."""
    mesh = Mesh(CommonSettings(nats_url=SecretStr(relay.url)), "test")
    await mesh.start()
    yield mesh
    await mesh.stop()


async def reconnected(mesh: Mesh) -> None:
    """Wait until the connection works again."""
    again = asyncio.Event()
    with mesh.on_reconnect(again.set):
        if not mesh.is_connected:
            async with asyncio.timeout(60):
                await again.wait()


async def test_connection_that_is_replaced_during_a_probe_is_kept(relay: Relay, relayed: Mesh) -> None:
    relay.closes = True
    assert not await relayed.probe(2)
    await reconnected(relayed)
    assert (relay.connections, relayed.reconnections) == (2, 1)
    assert await relayed.probe(WITHIN_S)
    assert relay.connections == 2


async def test_probes_of_a_half_open_connection_at_the_same_time_open_it_again_once(relay: Relay, relayed: Mesh) -> None:
    relay.drops = True
    assert await asyncio.gather(*(relayed.probe(2) for _ in range(3))) == [False] * 3
    await reconnected(relayed)
    assert (relay.connections, relayed.reconnections) == (2, 1)
    assert await relayed.probe(WITHIN_S)


async def test_connection_that_the_client_does_not_read_is_opened_again(relay: Relay, relayed: Mesh) -> None:
    reading = relayed.nc._reading_task
    assert reading is not None
    reading.cancel()
    await asyncio.wait((reading,))
    assert not await relayed.probe(WITHIN_S)
    await reconnected(relayed)
    assert await relayed.probe(WITHIN_S)


async def test_probe_that_is_under_way_ends_with_the_mesh(relay: Relay, nats_server: NatsServer) -> None:
    mesh = Mesh(CommonSettings(nats_url=SecretStr(relay.url)), "test")
    await mesh.start()
    relay.drops = True
    probe = asyncio.create_task(mesh.probe(WITHIN_S))
    async with asyncio.timeout(60):
        await relay.broken.wait()
    await mesh.stop()
    with pytest.raises(asyncio.CancelledError):
        await probe
