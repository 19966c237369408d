"""Servers shared by the whole test session."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import itertools
import os
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer

from tests.support import forking, pauses, prepared_database, what_ran
from tests.support.by_folder import ByFolder
from tests.support.examples import examples
from tests.support.failure_names import FailureNames
from tests.support.reaping import tie_to_this_process
from tests.support.servers import NatsServer, PostgresServer, kept_port

# Failed assertions of helpers name their values, as those of test modules do.
pytest.register_assert_rewrite(
    *(f"tests.{p.parent.name}" for p in Path(__file__).parent.glob("*/__init__.py") if p.parent.name != "support")
)

# libgomp reads it when torch is imported, which is while tests are collected. On a busy machine,
# threads that spin while they wait take several times the CPU time of operations on small tensors.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A slow machine makes examples exceed any deadline. Each run has the same examples, so that what
# fails fails again; `make test-long` looks for others.
hypothesis.settings.register_profile(
    "thaw", max_examples=examples(100), deadline=None, derandomize="THAW_TEST_RANDOM" not in os.environ
)
hypothesis.settings.load_profile("thaw")
_databases = itertools.count(1)
_WHOLE_MESHES = ("tests/e2e/", "tests/chaos/", "tests/integration/launcher/")
_MESH_TIMEOUT_S = 900
"""Timeout in seconds of a test with its fixtures, which start a mesh.

Waits within it have timeouts of up to 300 s each.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(what_ran.OPTION, type=Path, metavar="FILE", help="record which engines ran which model families")


def pytest_configure(config: pytest.Config) -> None:
    """End all processes of the run with it, even if it is killed.

    A worker ignores SIGINT; processes that a test starts and interrupts would inherit that.
    """
    tie_to_this_process()
    pauses.install()
    if hasattr(config, "workerinput"):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        config.pluginmanager.register(FailureNames(config))
        if (out := config.getoption(what_ran.OPTION)) is not None:
            config.pluginmanager.register(what_ran.Recorder(out))
    forking.install()


def pytest_unconfigure() -> None:
    forking.close()
    prepared_database.remove()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector away from what the collection of tests makes.

    Modules and tests are a million objects that stay until the end. To traverse them again and
    again is a sixth of the CPU time of each worker.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # after the folders' own, which mark tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(_WHOLE_MESHES) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_MESH_TIMEOUT_S))
    if config.getoption(what_ran.OPTION) is not None:
        what_ran.add_properties(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    forking.install_workers(config.invocation_params.args)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFolder:
    return ByFolder(config, log)


@pytest.fixture
def kernel_kills() -> Iterator[None]:
    """Serialize tests that depend on the OOM killer, whose counter is global."""
    with (Path(tempfile.gettempdir()) / "thaw-test-kernel-kills.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def new_port() -> Iterator[Callable[[], int]]:
    """Return a function that picks a port for a server, and keeps it until the end of the test."""
    with contextlib.ExitStack() as kept:
        yield lambda: int(kept.enter_context(kept_port()).getsockname()[1])


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


@pytest.fixture(scope="session")
def schema(postgres_server: PostgresServer) -> str:
    """Create a database with the scheduler's newest schema, for copies; return its name."""
    from services.scheduler.adapters.database import connect, migrate

    async def run(url: str) -> None:
        engine = connect(url)
        try:
            await migrate(engine)
        finally:
            await engine.dispose()

    asyncio.run(run(postgres_server.create_database("newest_schema")))
    return "newest_schema"


@pytest.fixture
def migrated_url(postgres_server: PostgresServer, schema: str) -> str:
    """Create a database with the newest schema: a copy costs a fifth of all migrations."""
    return postgres_server.create_database(f"test_{next(_databases)}", schema)
