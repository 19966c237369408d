"""One zygote and one demo model for all tests of the engine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.engines import Engines, ZygoteProcess
from tests.support.servers import NatsServer

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def demo_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from thaw.demo.models import make_demo_model

    return make_demo_model(tmp_path_factory.mktemp("demo") / "test", "test")


@pytest.fixture(scope="session")
def zygote() -> Iterator[ZygoteProcess]:
    # A socket's path must be short, which pytest's own directories are not.
    with tempfile.TemporaryDirectory(prefix="thaw-z-") as directory:
        process = ZygoteProcess(Path(directory))
        yield process
        process.close()


@pytest.fixture
async def mesh(nats_server: NatsServer) -> AsyncIterator[Mesh]:
    mesh = Mesh(CommonSettings(nats_url=SecretStr(nats_server.url)), "test")
    await mesh.start()
    yield mesh
    await mesh.stop()


@pytest.fixture
async def engines(mesh: Mesh, nats_server: NatsServer, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    """Each test has a node of its own."""
    node = f"n-{abs(hash(request.node.nodeid)) % 10**9}"
    engines = Engines(mesh, node, nats_server.url, tmp_path)
    await engines.start()
    yield engines
    engines.close()
