from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.nodeagent.suspend.cgroups import Cgroups, open_cgroups
from tests.integration.nodeagent.harness import Node, running_node
from tests.support.groups import remove_groups
from tests.support.paging import skip_unless_able
from tests.support.servers import NatsServer


@pytest.fixture
def able() -> None:
    skip_unless_able()


@pytest.fixture
async def node(able: None, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Node]:
    async with running_node(nats_server.url, tmp_path) as found:
        yield found


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def groups(request: pytest.FixtureRequest) -> Iterator[Cgroups]:
    """Yield control groups of each available version."""
    found = open_cgroups(f"t{uuid.uuid4().hex[:6]}", version=request.param)
    if not found.available:
        pytest.skip(f"no freezer of cgroup v{request.param} here: {found.reason}")
    yield found
    for instance_id in list(found.known()):
        found.kill(instance_id)
    remove_groups(f"{found.scope}.")
