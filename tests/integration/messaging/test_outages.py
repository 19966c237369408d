"""A process whose connection to NATS is lost, and that has much to send meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.errors import OutboundBufferLimitError
from pydantic import SecretStr

from services.gateway.adapters.key_marker import KeyMarker
from services.gateway.adapters.key_store import KeyStore
from services.gateway.adapters.rate_limiter import RateLimiter
from services.scheduler.adapters import clock
from services.scheduler.adapters.load_traces import LoadTraces
from services.scheduler.adapters.outbox import Outbox
from services.scheduler.adapters.outbox import log as outbox_log
from services.scheduler.domain.effects import PublishLoadFailed
from shared.contracts import subjects
from shared.contracts.demand import Demand, DemandNoted, LoadFailed
from shared.errors import EngineFailed, Unreachable
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


async def test_a_scheduler_logs_failed_loads_that_there_is_no_room_to_send(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    nothing: Any = None
    outbox = Outbox(mesh, nothing, nothing, LoadTraces(), nothing, nothing, 1.0, nothing, nothing, nothing)
    event = LoadFailed(model="m", error=EngineFailed("it failed").body())
    caplog.clear()
    outbox.carry_out([PublishLoadFailed(event), PublishLoadFailed(event)], clock.now())
    await asyncio.gather(*(lane.task for lane in outbox._lanes.values()))
    logged = [r for r in caplog.records if r.name == outbox_log.name]
    assert [(r.levelname, r.getMessage(), r.exc_info) for r in logged] == [("WARNING", "failed to publish a failed load", None)]


async def test_a_process_closes_its_connection_while_there_is_no_server(mesh: Mesh) -> None:
    await mesh.stop()
    assert mesh.nc.is_closed
