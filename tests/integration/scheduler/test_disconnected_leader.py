"""A leader whose connection to NATS is lost or half-open: it takes no node for lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

import pytest

from services.scheduler.adapters import connection as connection_of_leader
from services.scheduler.adapters.connection import PROBE_WITHIN_S, Connection
from shared.contracts.node import NODE_LOST_AFTER_S, InstanceState, StopInstance
from shared.messaging import Mesh
from tests.integration.scheduler.conftest import Site, process, spec
from tests.integration.scheduler.queries import plan_of
from tests.support.fake_node import FakeNode
from tests.support.servers import NatsServer


class Network:
    """The network between a process and NATS.

    Attributes:
        up: While it is not set, connections stay open and forward nothing.
    """

    def __init__(self, nats_port: int) -> None:
        self._nats_port = nats_port
        self.up = asyncio.Event()
        self.up.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._nats_port)
        await asyncio.gather(self._forward(reader, there[1]), self._forward(there[0], writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self.up.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.fixture
async def network(own_nats: NatsServer) -> AsyncIterator[tuple[Network, str]]:
    """Yield a network and the URL of NATS behind it."""
    network = Network(own_nats.port)
    async with await asyncio.start_server(network.serve, "127.0.0.1", 0) as server:
        yield network, f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        network.up.set()


async def begin_start(site: Site) -> None:
    """Begin a start that does not end yet; its node has reported it to the leader."""
    await site.add(spec("a", replicas={"min": 1, "max": 1}))

    async def is_loading() -> bool:
        return [i.state for n in (await site.view()).nodes for i in n.instances] == [InstanceState.LOADING]

    await site.until(is_loading)


async def end_start(site: Site, node: FakeNode) -> None:
    """Check that the start is still under way, and let it end."""
    plan = await plan_of(site, "a")
    assert plan.outcome == "pending", plan.reason
    assert node.hold_starts is not None
    node.hold_starts.set()

    async def is_ready() -> bool:
        return (await plan_of(site, "a")).outcome == "ready"

    await site.until(is_ready)
    assert len(node.started("a")) == 1
    assert not [c for c in node.commands if isinstance(c, StopInstance)]


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


async def test_nodes_outlive_a_half_open_connection_of_the_leader(site: Site, network: tuple[Network, str]) -> None:
    between, url = network
    node = await site.node(hold_starts=asyncio.Event())
    leader = await process(site, "half-open", THAW_NATS_URL=url)
    try:
        await begin_start(site)
        between.up.clear()
        await asyncio.sleep(NODE_LOST_AFTER_S + 2 * PROBE_WITHIN_S)
        between.up.set()
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
    monkeypatch.setattr(connection_of_leader, "PROBE_WITHIN_S", 60)
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
