"""One zygote and one demo model for all tests of the engine."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shared.messaging import Mesh
from tests.integration.engine.processes import exited, forked
from tests.integration.engine.stage_processes import Group
from tests.support.engines import Engines, ZygoteClient, ZygoteProcess
from tests.support.paced_zygote import MODULE, Pace
from tests.support.patient_mesh import mesh
from tests.support.segments import FakeLoader, card_of
from tests.support.servers import NatsServer

__all__ = ["mesh"]

if TYPE_CHECKING:
    from tests.integration.engine.loaded_model import LoadedModel


@pytest.fixture(scope="session")
def demo_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from thaw.demo.models import make_demo_model

    return make_demo_model(tmp_path_factory.mktemp("demo") / "test", "test")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread: small models, and tests beside each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def patient_transfers() -> Iterator[None]:
    """Let transfers between batchers take as long as a busy machine needs.

    Such a machine computes what it cannot transfer in time; tests count what is transferred.
    """
    from services.engine.kv_transfer import destination, exchange
    from tests.support.kv_transfer import PATIENT_S

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(destination, "CONNECT_WITHIN_S", PATIENT_S)
        patch.setattr(exchange, "REST_WITHIN_S", PATIENT_S / 2)  # the whole exchange has twice that
        yield


@pytest.fixture(scope="session")
def llamas(tmp_path_factory: pytest.TempPathFactory, demo_directory: Path) -> Iterator[Callable[[str], LoadedModel]]:
    """Load the family `llama` of `model_families` once in each data type."""
    with contextlib.ExitStack() as models:

        @cache
        def load(dtype: str) -> LoadedModel:
            return models.enter_context(loaded_llama(tmp_path_factory.mktemp(dtype), demo_directory, dtype))

        yield load


@pytest.fixture(params=["float32", "bfloat16"])
def llama(request: pytest.FixtureRequest, llamas: Callable[[str], LoadedModel]) -> LoadedModel:
    return llamas(request.param)


@pytest.fixture
def exact_llama(llamas: Callable[[str], LoadedModel]) -> LoadedModel:
    return llamas("float32")


@contextlib.contextmanager
def loaded_llama(directory: Path, tokenizer: Path, dtype: str) -> Iterator[LoadedModel]:
    import torch

    from tests.integration.engine.loaded_model import LoadedModel
    from tests.integration.engine.model_families import save

    model = LoadedModel(save("llama", directory / "m", tokenizer, getattr(torch, dtype)), dtype)
    try:
        yield model
    finally:
        model.close()


@pytest.fixture(scope="session")
def zygote() -> Iterator[ZygoteProcess]:
    # A socket path must be short, and pytest's own directories are too long.
    with tempfile.TemporaryDirectory(prefix="thaw-z-") as directory:
        process = ZygoteProcess(Path(directory), MODULE)
        yield process
        process.close()


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    """Return the pace of engines that have its environment."""
    return Pace(tmp_path)


@pytest.fixture
def paces(tmp_path: Path, pace: Pace) -> tuple[Pace, Pace]:
    """Return the paces of two engines, of which the test slows one."""
    return pace, Pace(tmp_path, "other_step_s")


@pytest.fixture
async def engines(mesh: Mesh, nats_server: NatsServer, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    """Give each test a node of its own."""
    node = f"n-{abs(hash(request.node.nodeid)) % 10**9}"
    engines = Engines(mesh, node, nats_server.url, tmp_path)
    await engines.start()
    yield engines
    engines.close()


@pytest.fixture
async def loader(mesh: Mesh, engines: Engines) -> AsyncIterator[FakeLoader]:
    loader = FakeLoader(mesh, engines.node)
    await loader.start()
    yield loader
    loader.close()


@pytest.fixture
async def client(zygote: ZygoteProcess) -> AsyncIterator[ZygoteClient]:
    client = await zygote.connect()
    yield client
    await client.close()


@pytest.fixture
async def instance(
    engines: Engines, loader: FakeLoader, client: ZygoteClient, demo_directory: Path, pace: Pace
) -> AsyncIterator[tuple[str, int]]:
    """Yield a ready engine of the demo model, and its pid."""
    start = engines.paced(card_of(demo_directory), pace)
    pid = await forked(client, start)
    report = await engines.settled(start.instance_id)
    assert report.state == "ready", report.error
    yield start.instance_id, pid
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    await exited(client, pid)


@pytest.fixture
async def group(engines: Engines, loader: FakeLoader, client: ZygoteClient) -> AsyncIterator[Group]:
    group = Group(engines, client, loader)
    yield group
    await group.close()
