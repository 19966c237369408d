"""Services shut down while NATS is unreachable.

They also do so if their NATS calls swallow the first cancellation.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from services.gateway.app import app as gateway
from services.gateway.settings import GatewaySettings
from services.loader.app import run as loader
from services.loader.settings import LoaderSettings
from services.migrator.app import run as migrator
from services.migrator.settings import MigratorSettings
from services.nodeagent.app import run as nodeagent
from services.nodeagent.settings import NodeagentSettings
from services.scheduler.app import run as scheduler
from services.scheduler.settings import SchedulerSettings
from shared.messaging import Mesh
from tests.support.launcher import ROOT

WITHIN_S = 60.0
REFUSED = "NATS error"
Service = Callable[[Any, asyncio.Event], Coroutine[Any, Any, int]]
SERVICES: dict[str, tuple[Service, type[Any]]] = {
    "gateway": (gateway, GatewaySettings),
    "scheduler": (scheduler, SchedulerSettings),
    "migrator": (migrator, MigratorSettings),
    "nodeagent": (nodeagent, NodeagentSettings),
    "loader": (loader, LoaderSettings),
}


@pytest.fixture
def environment(tmp_path: Path, new_port: Callable[[], int]) -> dict[str, str]:
    return {
        "THAW_HOME": str(tmp_path),
        "THAW_NATS_URL": f"nats://somebody:secret@127.0.0.1:{new_port()}",
        "THAW_DATABASE_URL": f"postgresql+asyncpg://thaw@127.0.0.1:{new_port()}/none",
        "THAW_GATEWAY_PORT": str(new_port()),
        "THAW_DEVICES": "cpu:0=1GiB",
        "THAW_ZYGOTE": "false",
    }


@pytest.mark.parametrize("name", SERVICES)
async def test_waiting_process_exits_on_sigterm_and_logs_its_reason(name: str, environment: dict[str, str]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", f"services.{name}"),
        env={k: v for k, v in os.environ.items() if not k.startswith("THAW_")} | environment,
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    logged: list[dict[str, Any]] = []
    async with asyncio.timeout(WITHIN_S):
        while not any(line["message"] == REFUSED for line in logged):
            logged.append(json.loads(await process.stderr.readline()))
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(WITHIN_S):
        _, rest = await process.communicate()
    assert process.returncode == 0, rest.decode()
    logged += map(json.loads, rest.splitlines())
    (refusal,) = (line for line in logged if line["message"] == REFUSED and "ConnectionRefused" in line["error"])
    assert refusal["servers"] == environment["THAW_NATS_URL"].rpartition("@")[2]
    assert "secret" not in json.dumps(logged)


@pytest.mark.parametrize("name", SERVICES)
async def test_shutdown_completes_if_a_cancellation_is_swallowed(
    name: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shutdown completes though a cancellation is swallowed.

    `asyncio.wait_for` does that before Python 3.12 if an attempt to connect fails at that moment.
    """
    connecting, swallowed = asyncio.Event(), asyncio.Event()

    async def start(mesh: Mesh) -> None:
        connecting.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if swallowed.is_set():
                    raise
                swallowed.set()

    monkeypatch.setattr(Mesh, "start", start)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    run, settings = SERVICES[name]
    stop = asyncio.Event()
    async with asyncio.timeout(WITHIN_S):
        running = asyncio.create_task(run(settings(), stop), name=name)
        await connecting.wait()
        stop.set()
        assert await running == 0
    assert swallowed.is_set()
