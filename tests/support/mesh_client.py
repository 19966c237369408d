"""A client of a mesh's NATS server, for tests of one side of a contract.

Import the fixture in a conftest. Fixtures of the same name in tests/chaos and tests/e2e are whole
meshes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pydantic import SecretStr

from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.nats_accounts import NatsAccount
from tests.support.servers import NatsServer


@asynccontextmanager
async def connected_mesh(server: NatsServer | NatsAccount, mesh_type: type[Mesh] = Mesh) -> AsyncIterator[Mesh]:
    mesh = mesh_type(CommonSettings(nats_url=SecretStr(server.url)), "test")
    await mesh.start()
    try:
        yield mesh
    finally:
        await mesh.stop()


@pytest.fixture
async def mesh(nats_server: NatsServer) -> AsyncIterator[Mesh]:
    """Connect to the NATS server that all tests of a process share."""
    async with connected_mesh(nats_server) as mesh:
        yield mesh
