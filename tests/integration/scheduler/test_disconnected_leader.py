"""A leader whose connection to NATS is lost or half-open: it takes no node for lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from shared.contracts.node import NODE_LOST_AFTER_S
from shared.messaging import Mesh
from shared.messaging import connection as connection_module
from shared.messaging.connection import PROBE_WITHIN_S, Connection
from tests.integration.scheduler.conftest import Site, process
from tests.integration.scheduler.held_starts import begin_start, end_start
from tests.support.nats_relay import NatsRelay
from tests.support.servers import NatsServer


@pytest.fixture
async def relay(own_nats: NatsServer) -> AsyncIterator[NatsRelay]:
    relay = NatsRelay(own_nats)
    async with relay.serving():
        yield relay


async def kill(leader: asyncio.subprocess.Process) -> None:
    leader.kill()
    await leader.communicate()


async def test_nodes_outlive_a_restart_of_nats(site: Site, own_nats: NatsServer) -> None:
    node = await site.node(hold_starts=asyncio.Event())
    leader = await process(site, "disconnected")
    try:
        await begin_start(site)
        own_nats.kill()
        await asyncio.sleep(NODE_LOST_AFTER_S + 1)
        own_nats.restart()
        await end_start(site, node)
    finally:
        await kill(leader)


async def test_nodes_outlive_a_half_open_connection_of_the_leader(site: Site, relay: NatsRelay) -> None:
    node = await site.node(hold_starts=asyncio.Event())
    leader = await process(site, "half-open", THAW_NATS_URL=relay.url)
    try:
        await begin_start(site)
        relay.up.clear()
        await asyncio.sleep(NODE_LOST_AFTER_S + 2 * PROBE_WITHIN_S)
        relay.up.set()
        await end_start(site, node)
    finally:
        await kill(leader)


async def test_node_that_dies_is_lost_while_the_connection_works(site: Site) -> None:
    node = await site.node()
    site.scheduler()

    async def is_alive(wanted: bool) -> bool:
        return [n.alive for n in (await site.view()).nodes] == [wanted]

    await site.until(partial(is_alive, True))
    await node.stop()
    await site.until(partial(is_alive, False))


async def test_connection_works_from_its_latest_reconnection_on(
    site: Site, own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "PROBE_WITHIN_S", 60)
    mesh = Mesh(site.settings, "leader")
    await mesh.start()
    try:
        connection = Connection(mesh)
        began_at = await connection.find_start(probe=True)
        assert began_at is not None
        assert await connection.find_start(probe=False) == began_at
        reconnected = asyncio.Event()
        with mesh.on_reconnect(reconnected.set):
            own_nats.kill()
            while mesh.is_connected:  # noqa: ASYNC110 - the client reports it to the mesh only
                await asyncio.sleep(0.01)
            assert await connection.find_start(probe=True) is None
            own_nats.restart()
            await reconnected.wait()
        since = await connection.find_start(probe=True)
        assert since is not None
        assert since > began_at
        assert await connection.find_start(probe=True) == since
    finally:
        await mesh.stop()
