"""A gateway that did not run for a while, as a stopped process or one without CPU time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from services.gateway.domain import route_table
from services.gateway.loop import IDLE_TICK_S, PAUSED_S, Gateway
from services.gateway.settings import GatewaySettings
from services.gateway.telemetry.metrics import Metrics
from services.gateway.telemetry.request_log import RequestLog
from shared.messaging import Mesh
from shared.tasks import end
from tests.unit.gateway.recorded_effects import instance, status

LOST_AFTER_S = 1.5


async def answer_probe(mesh: Mesh, within_s: float) -> bool:
    """Probe a server that answers."""
    return True


async def test_routes_outlive_a_pause_of_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statuses of that time wait in the connection, and are handled before nodes are lost."""
    monkeypatch.setattr(route_table, "NODE_LOST_AFTER_S", LOST_AFTER_S)
    monkeypatch.setattr(Mesh, "is_connected", True)
    monkeypatch.setattr(Mesh, "probe", answer_probe)
    settings = GatewaySettings(home=tmp_path)
    mesh = Mesh(settings, "gateway-test")
    gateway = Gateway(mesh, settings, RequestLog(mesh, Metrics()))
    routes = gateway.dispatcher.routes
    routes.on_status(status(instance("a")), time.monotonic())
    ticking = asyncio.create_task(gateway._tick())
    try:
        await asyncio.sleep(0)
        time.sleep(IDLE_TICK_S + PAUSED_S + 0.1)  # noqa: ASYNC251 - the process does not run
        for _ in range(20):  # what is due runs, and the connection is read
            await asyncio.sleep(0)
        assert routes.get("a") is not None
        routes.on_status(status(instance("a")), time.monotonic())
        async with asyncio.timeout(30):  # without further statuses the node is lost
            while routes.get("a") is not None:  # noqa: ASYNC110 - another task removes it
                await asyncio.sleep(0.02)
    finally:
        await end(ticking)
