"""The nodeagent's side of the hosts under test."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.hosted import Hosts
from tests.support.patient_mesh import PatientMesh
from tests.support.servers import NatsServer


@pytest.fixture
async def mesh(nats_server: NatsServer) -> AsyncIterator[Mesh]:
    mesh = PatientMesh(CommonSettings(nats_url=SecretStr(nats_server.url)), "test")
    await mesh.start()
    yield mesh
    await mesh.stop()


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a state directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="thaw-t-") as place:
        monkeypatch.setenv("THAW_HOME", place)
        yield Path(place)


@pytest.fixture
async def hosts(
    mesh: Mesh, nats_server: NatsServer, home: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Hosts]:
    """Give each test a node of its own."""
    hosts = Hosts(mesh, f"n-{abs(hash(request.node.nodeid)) % 10**9}", nats_server.url, tmp_path)
    await hosts.start()
    yield hosts
    hosts.close()
