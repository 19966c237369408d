"""A process whose connection to NATS is lost, and that has much to send meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from nats.errors import OutboundBufferLimitError
from pydantic import SecretStr

from services.gateway.adapters.key_marker import KeyMarker
from services.gateway.adapters.key_store import KeyStore
from services.gateway.adapters.rate_limiter import RateLimiter
from shared.contracts import subjects
from shared.contracts.demand import Demand, DemandNoted
from shared.errors import Unreachable
from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.servers import NatsServer


@pytest.fixture
def server() -> Iterator[NatsServer]:
    """Yield a NATS server that the test may kill."""
    server = NatsServer()
    yield server
    server.close()


@pytest.fixture
async def mesh(server: NatsServer) -> AsyncIterator[Mesh]:
    """Yield a mesh without a server, whose client takes nothing more to send."""
    mesh = Mesh(CommonSettings(nats_url=SecretStr(server.url)), "test")
    await mesh.start()
    server.kill()
    while mesh.nc.is_connected:  # noqa: ASYNC110 - the client reports it to the mesh only
        await asyncio.sleep(0.01)
    for size in (1 << 18, 1 << 12, 1 << 4):
        with pytest.raises(OutboundBufferLimitError):
            await _publish_without_end(mesh, bytes(size))
    yield mesh
    if not mesh.nc.is_closed:
        await mesh.stop()


async def _publish_without_end(mesh: Mesh, data: bytes) -> None:
    while True:
        await mesh.nc.publish("somewhere", data)


@pytest.mark.parametrize("with_reports", [False, True])
async def test_a_request_is_refused_while_there_is_no_room_to_send_it(mesh: Mesh, with_reports: bool) -> None:
    demand = Demand(gateway="gw", model="m", waiting=1)
    with pytest.raises(Unreachable, match="not connected to NATS"):
        await mesh.request(subjects.DEMAND, demand, DemandNoted, with_reports=with_reports)


async def test_a_gateway_outlives_a_presence_that_there_is_no_room_to_send(mesh: Mesh, tmp_path: Path) -> None:
    await RateLimiter(mesh, "gw", KeyStore(KeyMarker(tmp_path))).announce()
    assert not mesh.nc.is_connected


async def test_a_process_closes_its_connection_while_there_is_no_server(mesh: Mesh) -> None:
    await mesh.stop()
    assert mesh.nc.is_closed
