"""A mesh client for each test, on real NATS."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr

from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.servers import NatsServer


@pytest.fixture
async def mesh(nats_server: NatsServer) -> AsyncIterator[Mesh]:
    mesh = Mesh(CommonSettings(nats_url=SecretStr(nats_server.url)), "test")
    await mesh.start()
    yield mesh
    await mesh.stop()
