"""Servers shared by the whole test session."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.support.servers import NatsServer, PostgresServer

_databases = itertools.count(1)


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    server = NatsServer()
    yield server
    server.close()


@pytest.fixture
def own_nats() -> Iterator[NatsServer]:
    """A server of the test's own, for tests that stop it or need empty streams."""
    server = NatsServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture
def database_url(postgres_server: PostgresServer) -> str:
    """A fresh, empty database."""
    return postgres_server.create_database(f"test_{next(_databases)}")
