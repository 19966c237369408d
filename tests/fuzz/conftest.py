"""A gateway with fake engines and a scheduler without nodes, in a thread, for blocking clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pydantic import SecretStr

from services.gateway.app import app
from services.gateway.settings import GatewaySettings
from shared.contracts import subjects
from shared.contracts.admin import ADMIN_REQUEST, AdminRequest, ClusterView, ViewCluster
from shared.contracts.base import Message
from shared.errors import NotFound
from shared.messaging import Mesh
from shared.ports import free_port
from shared.telemetry.ids import SystemIds
from tests.support.fake_engine import FakeNode, card_of
from tests.support.servers import NatsServer

_STARTED_WITHIN_S = 120.0
"""Longer than the gateway's own limit, whose error then shows the cause."""


async def _answer_admin(request: AdminRequest) -> Message:
    """Answer as the leader of a mesh without nodes and models does."""
    if isinstance(request, ViewCluster):
        return ClusterView(scheduler="scheduler", epoch=1, policy="thaw")
    raise NotFound("There is no such model or node")


@asynccontextmanager
async def _running(nats_url: str, port: int, home: Path) -> AsyncIterator[None]:
    cards = (card_of("alpha"), card_of("vectors", task="embed"))
    node, stop = FakeNode(nats_url), asyncio.Event()
    await node.start(*cards)
    for card in cards:
        await node.engine(card.name, capacity=64)
    settings = GatewaySettings(nats_url=SecretStr(nats_url), gateway_port=port, drain_timeout=1.0, home=home)
    scheduler = Mesh(settings, "scheduler")
    scheduler.respond(subjects.ADMIN, ADMIN_REQUEST, _answer_admin, concurrent=True)
    await scheduler.start()
    serving = asyncio.create_task(app(settings, stop))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client, asyncio.timeout(60):
            while not await _ready(client):  # noqa: ASYNC110 - what is waited for is behind HTTP
                await asyncio.sleep(0.02)
        yield
    finally:
        stop.set()
        await serving
        await scheduler.stop()
        await node.stop()


async def _ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a gateway that serves `alpha` and `vectors`.

    It exports traces as a gateway process does.
    """
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider(id_generator=SystemIds()))
    nats, port, home = NatsServer(), free_port(), tmp_path_factory.mktemp("home")
    begun, end = threading.Event(), threading.Event()

    async def run() -> None:
        async with _running(nats.url, port, home):
            begun.set()
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="gateway")
    thread.start()
    try:
        assert begun.wait(_STARTED_WITHIN_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        end.set()
        thread.join(_STARTED_WITHIN_S)
        nats.close()
