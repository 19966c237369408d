"""Servers shared by the whole test session."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.support import forking
from tests.support.reaping import tie_to_this_process
from tests.support.servers import NatsServer, PostgresServer

# A slow machine makes examples exceed any deadline. Each run has the same examples, so that what
# fails fails again; `make test-long` looks for others.
hypothesis.settings.register_profile("thaw", deadline=None, derandomize="THAW_TEST_RANDOM" not in os.environ)
hypothesis.settings.load_profile("thaw")
_databases = itertools.count(1)
_TESTS = Path(__file__).parent
_GROUPS = (
    dict.fromkeys(("integration/suspend", "unit/suspend", "e2e/test_suspend.py", "e2e/test_engines.py"), "swap")
    | dict.fromkeys((f"chaos/test_{name}.py" for name in ("clients", "crowds", "kills", "servers")), "chaos")
    | dict.fromkeys((f"e2e/test_{name}.py" for name in ("console", "dashboards", "documents", "openai", "verbs")), "e2e")
)
"""Folders and files that one worker runs in sequence.

Those of "swap" page out and measure freed memory; the others share a mesh.
"""


_WHOLE_MESHES = ("e2e", "chaos", "integration/launcher")
_MESH_TIMEOUT_S = 600
"""Timeout in seconds of a test with its fixtures, which start a mesh.

Waits within it have timeouts of up to 180 s each.
"""


class ByFolder(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Scheduling that keeps each folder on one worker.

    The tests of a folder share servers, and some share a cgroup, the swap or the Docker Engine.
    pytest-xdist's own groups have no effect with this pytest version.
    """

    def _split_scope(self, nodeid: str) -> str:
        parts = nodeid.split("::")[0].split("/")[1:]
        folder = "docker" if parts[0] == "docker" else "/".join(parts[:2])
        return _GROUPS.get(folder, folder)


def pytest_configure(config: pytest.Config) -> None:
    """End all processes of the run with it, even if it is killed.

    A worker ignores SIGINT; processes that a test starts and interrupts would inherit that.
    """
    tie_to_this_process()
    if hasattr(config, "workerinput"):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    forking.install()


def pytest_unconfigure() -> None:
    forking.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    meshes = tuple(_TESTS / folder for folder in _WHOLE_MESHES)
    for item in items:
        if item.get_closest_marker("timeout") is None and any(folder in item.path.parents for folder in meshes):
            item.add_marker(pytest.mark.timeout(_MESH_TIMEOUT_S))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFolder:
    return ByFolder(config, log)


@pytest.fixture
def kernel_kills() -> Iterator[None]:
    """Serialize tests that depend on the OOM killer, whose counter is global."""
    with (Path(tempfile.gettempdir()) / "thaw-test-kernel-kills.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    server = NatsServer()
    yield server
    server.close()


@pytest.fixture
def own_nats() -> Iterator[NatsServer]:
    """Start a NATS server for a test that stops it or needs empty streams."""
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
    """Create an empty database."""
    return postgres_server.create_database(f"test_{next(_databases)}")
