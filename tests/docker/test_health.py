"""shared.health distinguishes a working service from a failed one.

No engine is needed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from pydantic import SecretStr, TypeAdapter

from shared.contracts import subjects
from shared.contracts.admin import ClusterView, ViewCluster
from shared.contracts.loader import LoaderStatus
from shared.health import VIEW
from shared.messaging import Mesh
from shared.messaging.streams import migrations_bucket
from shared.ports import free_port
from shared.settings import CommonSettings
from tests.support.servers import NatsServer


async def health(service: str, **environment: str) -> tuple[int | None, str]:
    """Return exit status and output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shared.health", service),
        env={**os.environ, **environment},
        stderr=asyncio.subprocess.PIPE,
    )
    _, output = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, output.decode()


@pytest.fixture
async def mesh(own_nats: NatsServer) -> AsyncIterator[Mesh]:
    mesh = Mesh(CommonSettings(nats_url=SecretStr(own_nats.url)), "test")
    await mesh.start()
    yield mesh
    await mesh.stop()


async def test_scheduler_is_healthy_while_the_mesh_has_a_leader(mesh: Mesh, own_nats: NatsServer) -> None:
    async def view(_: ViewCluster) -> ClusterView:
        return ClusterView(scheduler="s", epoch=1)

    leader = mesh.respond(subjects.ADMIN, TypeAdapter(ViewCluster), view)
    await leader.start()
    await mesh.flush()
    assert await health("scheduler", THAW_NATS_URL=own_nats.url) == (0, "")
    await leader.stop()
    await mesh.flush()
    status, output = await health("scheduler", THAW_NATS_URL=own_nats.url)
    assert status == 1
    assert "No process answers" in output


async def test_loader_is_healthy_while_its_status_is_received(mesh: Mesh, own_nats: NatsServer) -> None:
    async def broadcast() -> None:
        while True:
            for _ in range(20):  # more than the check reads
                await mesh.publish(subjects.loader_status("n"), LoaderStatus(node="n", boot_id="b"))
            await asyncio.sleep(0.1)

    publishing = asyncio.create_task(broadcast())
    assert await health("loader", THAW_NATS_URL=own_nats.url, THAW_NODE="n") == (0, "")
    assert (await health("loader", THAW_NATS_URL=own_nats.url, THAW_NODE="other"))[0] == 1
    publishing.cancel()


async def test_a_migrator_is_healthy_while_the_bucket_of_migrations_can_be_read(own_nats: NatsServer) -> None:
    status, output = await health("migrator", THAW_NATS_URL=own_nats.url)
    assert (status, output) == (1, "The bucket of migrations does not exist yet\n")
    mesh = Mesh(CommonSettings(nats_url=SecretStr(own_nats.url)), "test")
    await mesh.start()
    await migrations_bucket(mesh.nc.jetstream())
    await mesh.stop()
    assert await health("migrator", THAW_NATS_URL=own_nats.url) == (0, "")
    own_nats.kill()
    assert (await health("migrator", THAW_NATS_URL=own_nats.url))[0] == 1


async def test_no_service_is_healthy_without_nats() -> None:
    status, output = await health("nodeagent", THAW_NATS_URL=f"nats://127.0.0.1:{free_port()}")
    assert status == 1
    assert "TimeoutError" in output
    assert "is NATS reachable" in output


async def test_settings_are_read_from_files_of_secrets_too(own_nats: NatsServer, tmp_path: Path) -> None:
    (tmp_path / "thaw_nats_url").write_text(f"{own_nats.url}\n")
    status, output = await health("scheduler", THAW_SECRETS_DIR=str(tmp_path))
    assert status == 1
    assert "No process answers" in output


def test_the_question_to_the_scheduler_is_the_contracts() -> None:
    assert ViewCluster.model_validate(VIEW) == ViewCluster(brief=True, deadline_ms=5000)


def test_the_check_imports_neither_contracts_nor_the_mesh() -> None:
    """It runs every few seconds beside each service."""
    code = "import sys, shared.health, nats; sys.exit('pydantic' in sys.modules or 'faststream' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_gateway_is_healthy_when_it_is_ready() -> None:
    statuses = [200, 503]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/ready"
            self.send_response(statuses.pop(0))
            self.end_headers()
            self.wfile.write(b"not connected to NATS")

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        port = str(server.server_port)
        assert (await health("gateway", THAW_GATEWAY_PORT=port))[0] == 0
        status, output = await health("gateway", THAW_GATEWAY_PORT=port)
        assert status == 1
        assert "not connected to NATS" in output
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert (await health("gateway", THAW_GATEWAY_PORT=port))[0] == 1
