"""A loader in one process, without a mesh, whose clock does not advance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from services.loader.adapters.peer_sharing import Shared
from services.loader.adapters.reclaim import Reclaimer
from services.loader.adapters.records import Records
from services.loader.adapters.run import Threads
from services.loader.adapters.runs import Runs
from services.loader.domain.events import Event
from services.loader.handlers import Loader
from shared.contracts.loader import AttachWeights, Inspected, InspectModel, LoaderStatus, WeightsAttached
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import InstanceState, InstanceStatus, NodeOutline, NodeStatus
from shared.contracts.segment import segment_prefix
from weights.cache.store import SsdCache
from weights.pool.chunks import CHUNK_BYTES, Chunks
from weights.pool.memory import PoolMemory
from weights.sources.sources import Sources


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A loader with a clock that does not advance."""

    def __init__(self, home: Path) -> None:
        self.clock = Clock()
        self.records = Records(home / "loader", segment_prefix(home, "n"))
        (home / "loader" / "weights").mkdir(parents=True)
        self.sources = Sources(SsdCache(home / "cache", 0), (home / "small",))
        self.pool = PoolMemory(self.records.pool_name, 8 * CHUNK_BYTES)
        self.loader = self.another("boot")

    def another(self, boot: str, budget: int = 0) -> Loader:
        return Loader("n", boot, self.records, self.sources, self.workers, Chunks(self.pool.count, budget), self.clock)

    def workers(self, emit: Callable[[Event], None]) -> tuple[Runs, Reclaimer]:
        return Runs(self.pool, self.sources, emit, Threads(2, 2)), Reclaimer(self.pool, emit)

    async def card(self, directory: Path) -> ModelCard:
        spec = ModelSpec(name="m", source=str(directory))
        found = await self.loader.handle(InspectModel(spec=spec))
        assert isinstance(found, Inspected)
        return ModelCard(spec=spec, info=found.info, created=0)

    async def attach(self, instance: str, card: ModelCard) -> WeightsAttached:
        found = await self.loader.handle(AttachWeights(instance_id=instance, card=card, until="complete"))
        assert isinstance(found, WeightsAttached)
        return found

    async def node_knows(self, card: ModelCard, **instances: InstanceState) -> None:
        listed = tuple(
            InstanceStatus(
                instance_id=i,
                plan_id="p",
                token=1,
                model="m",
                generation=1,
                revision=card.info.revision,
                device_ids=("cpu:0",),
                state=s,
            )
            for i, s in instances.items()
        )
        status = NodeStatus(node="n", boot_id="b", seq=1, devices=(), instances=listed)
        await self.loader.on_node_status(NodeOutline.model_validate_json(status.model_dump_json()))

    def status(self, loader: Loader | None = None) -> LoaderStatus:
        return (loader or self.loader).status(Shared((), 0, 0, None, None))

    async def until_segments(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.status().segments) != count:
                await self.loader.changed.wait()
