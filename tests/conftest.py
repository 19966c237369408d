"""Servers shared by the whole test session."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import NatsServer, PostgresServer

_databases = itertools.count(1)
_TESTS = Path(__file__).parent
_ALONE = dict.fromkeys(
    (
        "integration/suspend",
        "integration/engines_real",
        "unit/suspend",
        "e2e/test_suspend.py",
        "e2e/test_engines.py",
    ),
    "swap",
)
"""Folders and files that one worker takes one after the other: they page out, and read what that freed."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers each folder stays on one: its tests share servers, and some of them a cgroup, the swap or the Docker Engine."""
    for item in items:
        parts = item.path.relative_to(_TESTS).parts
        folder = "docker" if parts[0] == "docker" else "/".join(parts[:2])
        item.add_marker(pytest.mark.xdist_group(_ALONE.get(folder, folder)))


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
