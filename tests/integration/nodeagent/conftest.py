from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.nodeagent.harness import Node, running_node
from tests.support.servers import NatsServer


@pytest.fixture
async def node(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Node]:
    async with running_node(nats_server.url, tmp_path) as found:
        yield found
