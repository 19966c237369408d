"""Mesh client and scheduler tests on the NATS and Postgres of testcontainers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import asyncpg
import pytest

from tests.contract import test_mesh
from tests.docker.engine import image_of
from tests.integration.scheduler import test_flow
from tests.integration.scheduler.conftest import site, tracing
from tests.support.mesh_client import mesh

__all__ = ["mesh", "site", "tracing"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
_databases = itertools.count(1)

globals().update({name: test for name, test in vars(test_mesh).items() if name.startswith("test_")})
test_demand_starts_one_instance_and_records_measurements_in_its_plan = (
    test_flow.test_demand_starts_one_instance_and_records_measurements_in_its_plan
)


@dataclass(frozen=True)
class Server:
    """The part of a server that the suites' fixtures use."""

    url: str


@pytest.fixture(scope="module")
def containers(engine: None) -> None:
    """Start containers without testcontainers' reaper, which would need another image.

    The `with` statement closes each container.
    """
    from testcontainers.core.config import testcontainers_config

    testcontainers_config.ryuk_disabled = True


@pytest.fixture(scope="module")
def nats_server(containers: None) -> Iterator[Server]:
    from testcontainers.community.nats import NatsContainer

    with NatsContainer(image_of("NATS_IMAGE"), jetstream=True) as container:
        yield Server(container.nats_uri())


@pytest.fixture(scope="module")
def own_nats(nats_server: Server) -> Server:
    return nats_server


@pytest.fixture(scope="module")
def postgres(containers: None) -> Iterator[str]:
    from testcontainers.community.postgres import PostgresContainer

    with PostgresContainer(image_of("POSTGRES_IMAGE"), username="thaw", password="thaw", dbname="thaw") as container:
        yield container.get_connection_url(driver=None)


@pytest.fixture
async def database_url(postgres: str) -> str:
    """Create an empty database."""
    name = f"test_{next(_databases)}"
    connection = await asyncpg.connect(postgres)
    try:
        await connection.execute(f"CREATE DATABASE {name}")
    finally:
        await connection.close()
    return postgres.rsplit("/", 1)[0] + "/" + name
