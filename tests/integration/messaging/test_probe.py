"""Probes of the connection to NATS, through a relay that breaks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr

from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.nats_relay import NatsRelay
from tests.support.servers import NatsServer

WITHIN_S = 60.0
"""A server that answers at all does so within this time."""
PING = b"PING\r\n"


@pytest.fixture
async def relay(nats_server: NatsServer) -> AsyncIterator[NatsRelay]:
    relay = NatsRelay(nats_server)
    async with relay.serving():
        yield relay


@pytest.fixture
async def relayed(relay: NatsRelay) -> AsyncIterator[Mesh]:
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


async def test_connection_that_is_replaced_during_a_probe_is_kept(relay: NatsRelay, relayed: Mesh) -> None:
    relay.break_at(PING, "close")
    assert not await relayed.probe(2)
    await reconnected(relayed)
    assert (relay.connections, relayed.reconnections) == (2, 1)
    assert await relayed.probe(WITHIN_S)
    assert relay.connections == 2


async def test_probes_of_a_half_open_connection_at_the_same_time_open_it_again_once(relay: NatsRelay, relayed: Mesh) -> None:
    relay.break_at(PING, "lose")
    assert await asyncio.gather(*(relayed.probe(2) for _ in range(3))) == [False] * 3
    await reconnected(relayed)
    assert (relay.connections, relayed.reconnections) == (2, 1)
    assert await relayed.probe(WITHIN_S)


async def test_connection_that_the_client_does_not_read_is_opened_again(relay: NatsRelay, relayed: Mesh) -> None:
    reading = relayed.nc._reading_task
    assert reading is not None
    reading.cancel()
    await asyncio.wait((reading,))
    assert not await relayed.probe(WITHIN_S)
    await reconnected(relayed)
    assert await relayed.probe(WITHIN_S)


async def test_probe_that_is_under_way_ends_with_the_mesh(relay: NatsRelay, nats_server: NatsServer) -> None:
    mesh = Mesh(CommonSettings(nats_url=SecretStr(relay.url)), "test")
    await mesh.start()
    relay.break_at(PING, "lose")
    probe = asyncio.create_task(mesh.probe(WITHIN_S))
    async with asyncio.timeout(60):
        await relay.broken.wait()
    await mesh.stop()
    with pytest.raises(asyncio.CancelledError):
        await probe
