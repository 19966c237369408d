"""The shell around the decisions, in one process without a mesh."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.loader.adapters.peer_sharing import Shared
from services.loader.adapters.reclaim import Reclaimer
from services.loader.adapters.records import Records
from services.loader.adapters.run import Threads
from services.loader.adapters.runs import Runs
from services.loader.domain.events import Event
from services.loader.handlers import Loader
from shared.contracts.loader import AttachWeights, Inspected, InspectModel, LoaderStatus, ReleaseWeights, WeightsAttached
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import InstanceState, InstanceStatus, NodeOutline, NodeStatus
from shared.contracts.segment import segment_prefix
from shared.errors import ShuttingDown
from tests.unit.loader.checkpoints import write_checkpoint
from weights.cache.store import SsdCache
from weights.pool.chunks import CHUNK_BYTES, Chunks
from weights.pool.memory import PoolMemory
from weights.pool.region import extents
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


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path / "home")
    yield bench
    await bench.loader.stop()
    bench.pool.close(unlink=True)


async def test_weights_of_instances_missing_from_the_node_are_removed(bench: Bench, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    card = await bench.card(tmp_path / "m")
    await bench.attach("a", card)
    await bench.attach("b", card)
    bench.clock.now += 60
    await bench.node_knows(card, a=InstanceState.READY, b=InstanceState.STOPPED)
    bench.clock.now += 5
    await bench.node_knows(card, a=InstanceState.READY, b=InstanceState.STOPPED)
    assert bench.status().segments[0].holders == ("a",)
    await bench.node_knows(card)
    bench.clock.now += 5
    await bench.node_knows(card)
    await bench.until_segments(0)
    assert bench.pool.count_allocated() == 0
    assert bench.records.recover(bench.pool) == ([], ())


async def test_holders_are_written_down(bench: Bench, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    card = await bench.card(tmp_path / "m")
    found = await bench.attach("a", card)
    await bench.attach("b", card)
    [record], mapped = bench.records.recover(bench.pool)
    assert record.holders == ("a", "b")
    assert extents(record.chunks, record.total_bytes) == found.extents
    next_life = bench.another("boot2")
    next_life.adopt([record], mapped)
    assert bench.status(next_life).segments[0].holders == ("a", "b")
    await next_life.stop()
    assert bench.pool.count_allocated() == found.total_bytes


async def test_weights_are_released_although_their_record_cannot_be_removed(bench: Bench, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    card = await bench.card(tmp_path / "m")
    (tmp_path / "home" / "loader" / "weights" / f"{card.info.revision}.json").mkdir()
    await bench.attach("a", card)
    async with asyncio.timeout(60):
        await bench.loader.handle(ReleaseWeights(instance_id="a"))
    assert bench.pool.count_allocated() == 0


async def test_a_stopped_loader_refuses(bench: Bench, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    card = await bench.card(tmp_path / "m")
    await bench.loader.stop()
    with pytest.raises(ShuttingDown):
        await bench.attach("a", card)


async def test_chunks_are_prepared_when_idle_and_freed_under_memory_pressure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = bench.another("boot3", budget=4 * CHUNK_BYTES)
    loader.adopt([], (), 3, at_once=False)
    keeping = asyncio.create_task(loader.keep_ready())
    try:
        await asyncio.sleep(0)
        assert bench.pool.count_allocated() == 0
        keeping.cancel()
        bench.clock.now += 60
        keeping = asyncio.create_task(loader.keep_ready())
        async with asyncio.timeout(60):
            while bench.status(loader).dram_bytes != 3 * CHUNK_BYTES or bench.pool.count_allocated() != 3 * CHUNK_BYTES:
                await loader.changed.wait()
        monkeypatch.setattr("services.loader.handlers.short_of_memory", lambda: CHUNK_BYTES)
        await loader.on_node_status(NodeOutline(node="n"))
        async with asyncio.timeout(60):
            while bench.pool.count_allocated() != 2 * CHUNK_BYTES:
                loader.changed.clear()
                await loader.changed.wait()
    finally:
        keeping.cancel()
        await loader.stop()
