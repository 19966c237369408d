"""The nodeagent's side of the hosts under test."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.messaging import Mesh
from tests.support.hosted import Hosts
from tests.support.patient_mesh import mesh
from tests.support.servers import NatsServer

__all__ = ["mesh"]


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
