"""A scheduler on real NATS and Postgres, with fake nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pydantic import SecretStr

from services.scheduler.adapters.database import plain_url
from services.scheduler.app import run
from services.scheduler.domain.policy import Policy
from services.scheduler.settings import SchedulerSettings
from shared.contracts import subjects
from shared.contracts.admin import AddModels, ClusterView, ExplainPlan, ModelsAdded, ViewCluster, ViewMigrations
from shared.contracts.base import Request
from shared.contracts.demand import Demand, DemandNoted, LoadFailed
from shared.contracts.models import ModelSpec
from shared.errors import DeadlineExceeded, Unavailable
from shared.messaging import Mesh
from shared.telemetry.ids import SystemIds
from tests.integration.loader.conftest import LoaderProcess
from tests.integration.loader.tiers_server import Faults, TierServer
from tests.support.fake_node import MIB, FakeNode
from tests.support.patient_mesh import patient
from tests.support.servers import NatsServer
from tests.support.shared_heap import shared_heap  # noqa: F401
from tests.unit.loader.checkpoints import tensors, write_checkpoint

QUESTIONS = (ViewCluster, ExplainPlan, ViewMigrations)
MB = 1_000_000
STALLED_AT = 4 * MB


class PatientSettings(SchedulerSettings):
    """Settings with which demand that a test reports once counts as long as the test waits."""

    def rules(self) -> Policy:
        return replace(super().rules(), demand_lost_after_s=120.0)


@dataclass
class Site:
    """One mesh under test."""

    mesh: Mesh
    settings: SchedulerSettings
    failed: list[LoadFailed] = field(default_factory=list)
    nodes: list[FakeNode] = field(default_factory=list)
    schedulers: list[tuple[asyncio.Event, asyncio.Task[int]]] = field(default_factory=list)

    async def node(self, **options: Any) -> FakeNode:
        node = FakeNode(self.mesh, **options)
        await node.start()
        self.nodes.append(node)
        return node

    def scheduler(self, **changes: Any) -> asyncio.Task[int]:
        """Run one more scheduler process's worth of work, as a task."""
        stop = asyncio.Event()
        task = asyncio.create_task(run(self.settings.model_copy(update=changes), stop))
        self.schedulers.append((stop, task))
        return task

    async def ask(self, message: Request, reply: type[Any]) -> Any:
        """Send a request to the leader, once there is one.

        Repeats a request without effect if no reply arrives: the leader may have been killed.
        """
        if not isinstance(message, QUESTIONS):
            message = patient(message)
        async with asyncio.timeout(60):  # with the start of a database, beside other suites
            while True:
                try:
                    return await self.mesh.request(subjects.ADMIN, message, reply)
                except DeadlineExceeded:
                    if not isinstance(message, QUESTIONS):
                        raise
                except Unavailable as e:
                    if e.code not in ("unreachable", "unavailable"):
                        raise
                    await asyncio.sleep(0.02)

    async def add(self, *specs: ModelSpec) -> ModelsAdded:
        added: ModelsAdded = await self.ask(AddModels(specs=specs), ModelsAdded)
        return added

    async def demand(self, model: str, waiting: int, **more: Any) -> DemandNoted:
        demand = Demand(gateway=more.pop("gateway", "g1"), model=model, waiting=waiting, **more)
        return await self.mesh.request(subjects.DEMAND, patient(demand), DemandNoted)

    async def view(self) -> ClusterView:
        view: ClusterView = await self.ask(ViewCluster(), ClusterView)
        return view

    async def until(self, condition: Callable[[], bool] | Callable[[], Awaitable[bool]], within: float = 60.0) -> None:
        """Wait until a condition holds, checked at every status of a node."""
        async with asyncio.timeout(within):
            while True:
                found = condition()
                if found if isinstance(found, bool) else await found:
                    return
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for stop, _ in self.schedulers:
            stop.set()
        await asyncio.gather(*(task for _, task in self.schedulers), return_exceptions=True)
        for node in self.nodes:
            await node.stop()


@pytest.fixture(scope="session", autouse=True)
def tracing() -> None:
    """Give spans ids, without an exporter."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider(id_generator=SystemIds()))


@pytest.fixture
async def site(own_nats: NatsServer, migrated_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    settings = PatientSettings(
        nats_url=SecretStr(own_nats.url),
        database_url=SecretStr(migrated_url),
        min_active=0.2,
        preempt_after=3.0,
        home=tmp_path / "home",
    )
    mesh = Mesh(settings, "test")
    await mesh.start()
    site = Site(mesh, settings)

    async def failed(event: LoadFailed) -> None:
        site.failed.append(event)

    await mesh.listen(subjects.LOAD_FAILED, LoadFailed, failed).start()
    yield site
    with contextlib.suppress(asyncio.CancelledError):
        await site.close()
    await mesh.stop()


def spec(name: str, **more: Any) -> ModelSpec:
    return ModelSpec(name=name, source=f"/models/{name}", **more)


async def process(site: Site, name: str, **environment: str) -> asyncio.subprocess.Process:
    """Start a scheduler as an OS process; its `stderr` has its log."""
    settings = {
        "THAW_NATS_URL": site.settings.nats_url.get_secret_value(),
        "THAW_DATABASE_URL": site.settings.database_url.get_secret_value(),
        "THAW_SCHEDULER_NAME": name,
        "THAW_LOG_LEVEL": "warning",
    }
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.scheduler",
        env=os.environ | settings | environment,
        cwd=Path(__file__).parents[3],
        stderr=asyncio.subprocess.PIPE,
    )


async def standby(site: Site) -> None:
    """Wait until another scheduler waits for the lock."""
    connection = await asyncpg.connect(plain_url(site.settings.database_url.get_secret_value()))
    try:
        waiting = (
            "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database "
            "WHERE locktype = 'advisory' AND NOT granted AND datname = current_database()"
        )

        async def found() -> bool:
            return bool(await connection.fetchval(waiting))

        await site.until(found)
    finally:
        await connection.close()


@pytest.fixture
def afar(tmp_path: Path) -> Iterator[TierServer]:
    """Register the models `likely`, of 20 MB, whose load stops half-way, and `wanted`."""
    write_checkpoint(tmp_path / "www" / "likely", tensors(megabytes=20))
    write_checkpoint(tmp_path / "www" / "wanted", tensors(megabytes=2, seed=1))
    server = TierServer(tmp_path / "www")
    server.faults = Faults(suffix="likely/model.safetensors", stall_from=STALLED_AT)
    yield server
    server.close()


@pytest.fixture
def loader(own_nats: NatsServer, tmp_path: Path) -> Iterator[LoaderProcess]:
    """Prepare a loader process with caches of 100 MB; the test starts it."""
    process = LoaderProcess(own_nats.url, tmp_path / "home", "node-0")
    process.environment |= {"THAW_DRAM_BYTES": str(100 * MB), "THAW_CACHE_BYTES": str(100 * MB)}
    process.home.mkdir()
    yield process
    process.close()


@pytest.fixture
async def node(site: Site) -> FakeNode:
    """Start a node whose device has 200 MiB beside a pinned model.

    Its engines are fakes, its loader is a process.
    """
    return await site.node(budget=1000 * MIB, loads=False)
