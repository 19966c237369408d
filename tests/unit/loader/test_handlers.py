"""The shell around the decisions, in one process without a mesh."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.contracts.loader import ReleaseWeights
from shared.contracts.node import InstanceState, NodeOutline
from shared.errors import ShuttingDown
from tests.unit.loader.checkpoints import write_checkpoint
from tests.unit.loader.loader_bench import Bench
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.region import extents


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
