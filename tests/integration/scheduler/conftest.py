"""A scheduler on real NATS and Postgres, with nodes that are fakes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pydantic import SecretStr

from services.scheduler.app import run
from services.scheduler.settings import SchedulerSettings
from shared.contracts import subjects
from shared.contracts.admin import AddModels, ClusterView, ModelsAdded, ViewCluster
from shared.contracts.base import Message, Request
from shared.contracts.demand import Demand, DemandNoted, LoadFailed
from shared.contracts.models import ModelSpec
from shared.errors import Unavailable
from shared.messaging import Mesh
from tests.support.fake_node import FakeNode
from tests.support.servers import NatsServer


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
        """One more scheduler process's worth of work, as a task."""
        stop = asyncio.Event()
        task = asyncio.create_task(run(self.settings.model_copy(update=changes), stop))
        self.schedulers.append((stop, task))
        return task

    async def ask(self, message: Request, reply: type[Any]) -> Any:
        """Ask the leader, once there is one."""
        async with asyncio.timeout(15):
            while True:
                try:
                    return await self.mesh.request(subjects.ADMIN, message, reply)
                except Unavailable as e:
                    if e.code not in ("unreachable", "unavailable"):
                        raise
                    await asyncio.sleep(0.02)

    async def add(self, *specs: ModelSpec) -> ModelsAdded:
        added: ModelsAdded = await self.ask(AddModels(specs=specs), ModelsAdded)
        return added

    async def demand(self, model: str, waiting: int, **more: Any) -> DemandNoted:
        demand = Demand(gateway=more.pop("gateway", "g1"), model=model, waiting=waiting, **more)
        return await self.mesh.request(subjects.DEMAND, demand, DemandNoted)

    async def view(self) -> ClusterView:
        view: ClusterView = await self.ask(ViewCluster(), ClusterView)
        return view

    async def until(self, condition: Callable[[], bool] | Callable[[], Awaitable[bool]], within: float = 15.0) -> None:
        """Wait until something is so, looking again at every status of a node."""
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
    """Spans with ids, exported nowhere."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())


@pytest.fixture
async def site(own_nats: NatsServer, database_url: str) -> AsyncIterator[Site]:
    settings = SchedulerSettings(
        nats_url=SecretStr(own_nats.url), database_url=SecretStr(database_url), min_active=0.2, preempt_after=3.0
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


__all__ = ["Message", "Site", "spec"]
